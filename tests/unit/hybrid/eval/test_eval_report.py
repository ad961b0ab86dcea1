"""AUP per strategy and task, the tables, the page, the pictures."""

from __future__ import annotations

import sys

import pytest

from hybrid.errors import ConfigError
from hybrid.eval.plots import plot_front, plot_report
from hybrid.eval.report import aup_rows, document_of, markdown_of, remarks_of, tables_of
from hybrid.metrics import aup
from hybrid.pictures import is_available

ENVIRONMENT = {
    "gpu": None, "cpu": "CPU", "threads": 1, "torch": "2", "transformers": "5", "hybrid": "1",
    "peak_memory_mib": 9.0, "git_sha": "0123456789", "is_dirty": True, "date": "2026-01-02T03:04",
}  # fmt: skip
SETTINGS = {"model": "m", "dtype": "float32", "quality": "accuracy"}


def row(strategy, task, accuracy, tpf, **parameters):
    return {
        "strategy": strategy,
        "parameters": parameters,
        "task": task,
        "num_items": 10,
        "num_right": round(10 * accuracy),
        "accuracy": accuracy,
        "tokens_per_forward": tpf,
        "total_tokens_per_forward": 0.9 * tpf,
        "tokens_per_second": 50.0,
        "latency_ms": 1000 / (tpf or 1),
    }


ROWS = [
    row("ar", "sums", 0.8, 1.0),
    row("fast", "sums", 0.69, 2.0, k=2),
    row("fast", "sums", 0.70, 1.0, k=1),
    row("fast", "sums", 0.66, 4.0, k=4),
    row("fast", "names", 0.5, 1.0, k=1),
    row("fast", "names", 0.1, 4.0, k=4),
    row("fast", "places", 0.3, 0.0, k=1),
]
DOCUMENT = document_of(ROWS, SETTINGS, ENVIRONMENT)


def test_the_settings_of_a_strategy_are_its_curve() -> None:
    found = {(r["strategy"], r["task"]): r for r in aup_rows(ROWS)}
    fast = found["fast", "sums"]
    # The authors' own number for these points; the best of the task is that of `ar`.
    assert fast["aup"] == pytest.approx(201.61407466339514, rel=1e-9)
    assert fast["aup"] == pytest.approx(aup([1, 2, 4], [70, 69, 66], 80), rel=1e-9)
    assert (fast["num_settings"], fast["best"], fast["reason"]) == (3, 80, None)
    assert found["ar", "sums"]["aup"] == 80
    assert found["fast", "names"]["aup"] is None
    assert "40 points below" in found["fast", "names"]["reason"]
    assert "TPF 0" in found["fast", "places"]["reason"]


def test_tables() -> None:
    tables = {table.title: table for table in tables_of(DOCUMENT)}
    assert list(tables) == ["sums", "names", "places", "AUP (accuracy under parallelism)"]
    assert tables["sums"].rows[1] == ("fast k=2", "69.0%", "7/10", "2.00", "1.80", "50.0", "500")
    aups = tables["AUP (accuracy under parallelism)"]
    assert aups.columns == ("strategy", "settings", "sums", "names", "places")
    assert aups.rows == (("ar", "1", "80.0", "-", "-"), ("fast", "3", "201.6", "-", "-"))
    reasons = remarks_of(DOCUMENT)
    assert [text.split(":")[0] for text in reasons[:2]] == ["fast on names", "fast on places"]
    assert reasons[-1].startswith("CPU, 1 threads")


def test_the_page_is_made_from_the_document() -> None:
    page = markdown_of(DOCUMENT, ["curves.png"])
    for part in (
        "# Evaluation",
        "m, float32, 2026-01-02, hybrid 1, commit 0123456 with local changes; greedy, batch 1.",
        "| fast k=2 | 69.0% | 7/10 | 2.00 | 1.80 | 50.0 | 500 |",
        "fast on names: AUP: ",
        "![curves.png](curves.png)",
    ):
        assert part in page


def is_png(path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_pictures(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    assert is_available()
    assert [path.name for path in plot_report(DOCUMENT, tmp_path)] == ["curves.png", "radar.png"]
    two = document_of(ROWS[:5], SETTINGS, ENVIRONMENT)  # a radar of two tasks would be a line
    assert [path.name for path in plot_report(two, tmp_path / "two")] == ["curves.png"]
    points = [
        {"strategy": "fast", "parameters": {"k": k}, "quality": 0.1 * k, "tokens_per_second": 9 - k,
         "is_on_front": k > 1}
        for k in (1, 2, 3)
    ]  # fmt: skip
    front = {"points": points, "chosen": points[1], "baseline": points[0], "settings": SETTINGS}
    assert plot_front(front, tmp_path / "front.png").name == "front.png"
    assert plot_front({**front, "baseline": None}, tmp_path / "second.png")
    assert all(is_png(path) for path in tmp_path.rglob("*.png"))
    assert list(tmp_path.rglob("*.part")) == []


def test_without_matplotlib_it_says_how_to_get_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"hybrid-decoder\[plot\]"):
        plot_report(DOCUMENT, tmp_path)
    assert list(tmp_path.iterdir()) == []
