"""A picture of a run: it is one, and it shows what was measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hybrid import pictures
from hybrid.errors import ConfigError
from hybrid.training import plot
from hybrid.training.plot import plot_metrics


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def rows(num_positions: int = 0) -> list[dict[str, Any]]:
    found = []
    for step in range(1, 101):
        row: dict[str, Any] = {"step": step, "loss": 5 / step, "learning_rate": 1 - step / 100}
        if num_positions and step % 20 == 0:
            row["accuracy_by_position"] = [step / 100 / (i + 1) for i in range(num_positions)]
            row["expected_acceptance_length"] = 1 + step / 50
        found.append(row)
    return found


@pytest.mark.parametrize("num_positions", [0, 1, 8])
def test_writes_a_png(tmp_path: Path, num_positions: int) -> None:
    pytest.importorskip("matplotlib")
    path = plot_metrics(write(tmp_path, rows(num_positions)))
    assert path == tmp_path / "metrics.png"
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(content[i : i + 4], "big") for i in (16, 20))
    assert (width, height) == (960, 288 * (4 if num_positions else 2)), "a panel per measurement"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "metrics.png"]


def test_one_step_is_enough(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert plot_metrics(write(tmp_path, rows(2)[19:20])).stat().st_size > 1000


def test_lines_are_the_metrics(tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = figure.subplots()
    plot._plot_positions("accuracy_by_position", axes, rows(3))
    assert [list(line.get_xdata()) for line in axes.lines] == [[20, 40, 60, 80, 100]] * 3
    assert list(axes.lines[1].get_ydata()) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["1", "2", "3"]


def test_smoothing_keeps_a_constant_and_follows_a_change() -> None:
    assert plot._smooth([2.0] * 300) == pytest.approx([2.0] * 300)
    assert plot._smooth([3.0, 5.0]) == [3.0, 5.0], "a short run is shown as it is"
    step = plot._smooth([0.0] * 500 + [1.0] * 500)
    assert step[499] == 0
    assert step[519] == pytest.approx(1 - (1 - 1 / 20) ** 20)


def test_a_folder_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no metrics\.jsonl"):
        plot_metrics(tmp_path)


def test_matplotlib_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    assert not pictures.is_available()
    with pytest.raises(ConfigError, match=r"hybrid-decoder\[plot\]"):
        plot_metrics(write(tmp_path, rows()))
