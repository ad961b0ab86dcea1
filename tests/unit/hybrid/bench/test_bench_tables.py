"""What the JSON of a benchmark says by category and position, as tables and on a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fakes import random_adapter, tiny_backbone
from repository import ROOT

from hybrid import HybridDecoder
from hybrid.bench import report
from hybrid.bench.candidates import Answer, DecoderCandidate
from hybrid.bench.page import render
from hybrid.bench.runner import Sample
from hybrid.bench.tables import TextTable, machine_of, ratio_to_ar, remarks_of, tables_of
from hybrid.errors import ConfigError
from hybrid.metrics import acceptance_by_position, speedup
from hybrid.types import Stats

ENVIRONMENT = {
    "git_sha": "3056a879c670d3bc426137e4ee23de6cf57b96bf",
    "is_dirty": False,
    "date": "2026-11-29T18:44:27+00:00",
    "gpu": None,
    "cpu": "AMD EPYC",
    "threads": 2,
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "peak_memory_mib": 2109.24,
}
CATEGORIES = ["chat", "code", "chat", None]


def stats(decoded: int, passes: int) -> Stats:
    return Stats(num_verify_forwards=passes, acceptance_length=decoded / passes)


def sample(seconds: float, num_tokens: int, passes: int, first: int = 0) -> Sample:
    tokens = tuple(range(first, first + num_tokens))
    return Sample(Answer(tokens, stats=stats(num_tokens - 1, passes)), seconds)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Two candidates on four prompts; the second answer of `speculative` is wrong."""
    backbone = tiny_backbone("llama")
    decoder = HybridDecoder(backbone, adapter=random_adapter(backbone))
    ar, speculative = (DecoderCandidate(decoder, name) for name in ("ar", "speculative"))
    samples = {
        ar.name: [sample(8.0, 9, 8), sample(4.0, 5, 4), sample(9.0, 9, 8), sample(1.0, 2, 1)],
        speculative.name: [
            sample(4.0, 9, 4),  # twice as fast, 8 tokens in 4 passes
            sample(8.0, 5, 4, first=1),
            sample(3.0, 9, 1),
            sample(9.0, 2, 1),
        ],
    }
    prompts = [[1], [2], [3], [4]]
    return report.report_rows([ar, speculative], samples, prompts, 9, CATEGORIES)


def document(rows: list[dict[str, Any]]) -> dict[str, Any]:
    settings = {"num_prompts": 4, "prompts": "few.jsonl", "max_new_tokens": 9, "batch": 1}
    return {"kind": "generate", "settings": settings, "rows": rows, "environment": ENVIRONMENT}


def older(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows as they were before categories and the ratio to our own `ar` were recorded."""
    kept = [{k: v for k, v in row.items() if k != "by_category"} for row in rows]
    return [{**row, "ratios": {}} for row in kept]


def titled(found: dict[str, Any], title: str) -> TextTable:
    return next(table for table in tables_of(found) if table.title.startswith(title))


def test_categories_are_pooled_by_themselves(rows) -> None:
    ar, speculative = rows
    assert speculative["by_category"] == {
        # 8 tokens in 4 passes and 8 in 1; the ratios of the two prompts are 2 and 3.
        "chat": {
            "num_prompts": 2,
            "acceptance_length": pytest.approx(16 / 5),
            "ratio_to_ar": pytest.approx(2.5),
            "num_greedy_match": 2,
        },
        "code": {
            "num_prompts": 1,
            "acceptance_length": 1.0,
            "ratio_to_ar": 0.5,
            "num_greedy_match": 0,
        },
    }
    assert ar["by_category"]["code"]["num_greedy_match"] is None
    assert ar["by_category"]["code"]["ratio_to_ar"] == ar["ratios"]["ar"] == 1.0
    assert speculative["ratios"]["ar"] == pytest.approx(1.25)  # the median of 2, 1/2, 3 and 1/9
    json.dumps(rows)


def test_without_ar_there_is_no_ratio_to_it() -> None:
    backbone = tiny_backbone("llama")
    ngram = DecoderCandidate(HybridDecoder(backbone), "ngram")
    samples = {ngram.name: [sample(1.0, 4, 2)]}
    (row,) = report.report_rows([ngram], samples, [[1]], 4, ["chat"])
    assert row["ratios"] == {}
    assert row["by_category"]["chat"]["ratio_to_ar"] is None
    assert "by_category" not in report.report_rows([ngram], samples, [[1]], 4)[0]
    (line,) = titled(document([row]), "By category").rows
    assert line == ("chat", "float32 ngram", "1", "1.50", "-", "-")


def test_own_ar_is_that_of_the_same_precision() -> None:
    backbone = tiny_backbone("llama")
    candidates = [DecoderCandidate(HybridDecoder(backbone), name) for name in ("ngram", "ar", "ar")]
    candidates[1].dtype = "int4"
    assert report.own_ar(candidates[0], candidates) is candidates[2]
    assert report.own_ar(candidates[1], candidates) is candidates[1]


def test_share_of_passes_that_got_to_a_position() -> None:
    assert acceptance_by_position([5, 3, 0, 2], 4) == [0.5, 0.2, 0.2, 0.0]
    assert acceptance_by_position([], 2) == [0.0, 0.0]
    assert speedup([1.0, 2.0, 4.0], [4.0, 4.0, 4.0]) == 2.0


def test_tables_say_what_the_rows_hold(rows) -> None:
    found = document(rows)
    speed = titled(found, "Speed")
    assert speed.columns == ("candidate", "× own ar", "tokens/s", "equal")
    assert [line[1:2] + line[3:] for line in speed.rows] == [("1.00", "-"), ("1.25", "3/4")]
    assert titled(found, "By category").rows == (
        ("chat", "float32 speculative", "2", "3.20", "2.50", "2/2"),
        ("code", "float32 speculative", "1", "1.00", "0.50", "0/1"),
    )
    assert all(len(line) == len(t.columns) for t in tables_of(found) for line in t.rows)
    remarks = remarks_of(found)
    assert remarks[0] == "Equal in float32: the tokens of float32 ar."
    assert "leaves float32 ar first in prompt 1 at token 0: expected 0, got 1" in remarks[1]
    assert "AMD EPYC, 2 threads" in machine_of(found)


def test_a_position_that_nobody_reached_is_zero_and_one_not_drafted_is_empty(rows) -> None:
    three = {**rows[1], "num_draft_tokens": 3, "acceptance_histogram": [1, 1]}
    two = {**rows[1], "num_draft_tokens": 2, "acceptance_histogram": [1, 2, 1]}
    table = titled(document([three, {**two, "name": "two"}]), "Passes")
    assert table.columns == ("candidate", "1", "2", "3")
    assert [line[1:] for line in table.rows] == [("50%", "0%", "0%"), ("75%", "25%", "-")]


def test_times_stand_in_order_of_width(rows) -> None:
    times = [{"1": 1.0, "draft": 9.0}, {"2": 2.0, "10": 10.0}]
    timed = [{**row, "ms_per_forward": own} for row, own in zip(rows, times, strict=True)]
    table = titled(document(timed), "Milliseconds")
    assert table.columns == ("candidate", "1", "2", "10", "draft")
    assert [line[1:] for line in table.rows] == [
        ("1.0", "-", "-", "9.0"),
        ("-", "2.0", "10.0", "-"),
    ]
    untimed = document([{**row, "ms_per_forward": None} for row in rows])  # not a CPU
    assert not any(table.title.startswith("Milliseconds") for table in tables_of(untimed))
    widths = {"kind": "widths", "ms_per_forward": {"int4": {"1": 6.0, "8": 17.0}}}
    (table,) = tables_of({**document([]), **widths})
    assert (table.columns, table.rows) == (("precision", "1", "8"), (("int4", "6.0", "17.0"),))


def test_an_older_line_is_completed(rows) -> None:
    old = older(rows)
    assert [ratio_to_ar(row, old) for row in old] == [1.0, pytest.approx(rows[1]["ratios"]["ar"])]
    assert ratio_to_ar(old[1], old[1:]) is None
    assert ratio_to_ar({**old[0], "engine": "llama.cpp"}, old) is None
    assert titled(document(old), "Speed") == titled(document(rows), "Speed")


PAGE = """# Results

Before.

<!-- bench:begin few.jsonl line 2 -->
stale
<!-- bench:end -->

Between.

<!-- bench:begin few.jsonl -->
<!-- bench:end -->
"""


@pytest.fixture
def folder(tmp_path: Path, rows: list[dict[str, Any]]) -> Path:
    documents = document(older(rows)), document(rows)
    documents[0]["environment"] = {**ENVIRONMENT, "is_dirty": True}
    lines = [json.dumps(found) for found in documents]
    (tmp_path / "few.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_a_page_keeps_its_prose_and_gets_its_tables(folder) -> None:
    made = render(PAGE, folder)
    assert made.startswith("# Results\n\nBefore.\n\n<!-- bench:begin few.jsonl line 2 -->\n\n`few")
    assert "stale" not in made
    one, both = made.split("Between.")
    assert "| code | float32 speculative | 1 | 1.00 | 0.50 | 0/1 |" in one
    assert "2026-11-29, commit 3056a87, 4 prompts (few.jsonl)" in one
    assert both.count("**Speed**") == 2
    assert both.count("commit 3056a87 with local changes, 4 prompts") == 1
    assert "holds no categories" in both
    assert "holds no categories" not in one
    assert render(made, folder) == made


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("no block", "no block to fill"),
        ("<!-- bench:begin none.jsonl -->\n<!-- bench:end -->", "none.jsonl cannot be read"),
        ("<!-- bench:begin few.jsonl line 3 -->\n<!-- bench:end -->", "got line 3"),
        ("<!-- bench:begin bad.jsonl -->\n<!-- bench:end -->", "bad.jsonl cannot be read"),
        ("<!-- bench:begin odd.jsonl -->\n<!-- bench:end -->", "odd.jsonl, line 1 is no report"),
    ],
)
def test_a_page_that_cannot_be_made_says_why(folder, page, message) -> None:
    (folder / "bad.jsonl").write_text("nonsense\n")
    (folder / "odd.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=message):
        render(page, folder)


def test_the_committed_page_is_what_its_lines_say() -> None:
    """Run `hybrid bench report docs/results.md` when this fails."""
    page = ROOT / "docs" / "results.md"
    assert render(page.read_text(), page.parent) == page.read_text()
