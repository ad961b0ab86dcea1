"""The report of benchmarks/gpu: what was measured, which bars it met, which cannot be judged.

The numbers in here are made up.
"""

from __future__ import annotations

import json
import sys
from copy import deepcopy

import pytest
from repository import ROOT

QUANTILES = {"median": 10.0, "p20": 9.0, "p80": 12.0, "is_graph": True}
RUN = {"model": "made-up", "graphs": True, "speed_only": True}
EXACT = {
    "kind": "exact", "model": "made-up", "exact": True, "width": 8, "logits": 100,
    "ms": {"median": 15.0}, "differing_logits": 0, "differing_choices": 0,
}  # fmt: skip
MADE_UP = {
    "kind": "gpu",
    "settings": {"device": "cuda", "parts": ["tests", "kernels"], "limit_s": 450},
    "environment": {
        "gpu": "Made-up GPU", "cpu": "x", "date": "2026-01-02T00:00:00", "git_sha": "a" * 40,
        "is_dirty": False, "python": "3.12", "torch": "2.11", "triton": "3.6",
        "transformers": "5.17", "driver": "580", "cuda": "13.0",
    },
    "parts": {
        "tests": {"status": "out of time", "left_out": ["some"], "records": [
            {"kind": "tests", "exit_code": None, "counts": {"passed": 7, "not reached": 2},
             "failed": []},
        ]},
        "ceilings": {"status": "done", "records": [
            {"kind": "ceiling", "name": "copy", "gbytes_per_s": 4000.0},
            {"kind": "ceiling", "name": "read, sum", "gbytes_per_s": 2000.0},
            {"kind": "ceiling", "name": "read, product with a vector", "gbytes_per_s": 4200.0},
            {"kind": "ceiling", "name": "product, bfloat16", "tflops": 700.0},
        ]},
        "kernels": {"status": "out of time", "left_out": ["sample N1"], "records": [
            {"kind": "kernel", "op": "logits_stats", "case": "N9", "bytes": 36e6, "flops": 1e6,
             "microseconds": QUANTILES, "gbytes_per_s": 3600.0, "tflops": 0.1, "bar": 0.85,
             "others": {"torch": {"median": 25.0, "is_graph": True},
                        "sort": {"median": 5.0, "is_graph": False},
                        "new": {"problem": "ImportError: not in this torch"}}},
            {"kind": "kernel", "op": "linear", "case": "N512", "bytes": 4e6, "flops": 3.5e9,
             "microseconds": {**QUANTILES, "is_graph": False}, "gbytes_per_s": 400.0,
             "tflops": 350.0, "bar": None, "others": {}},
            {"kind": "kernel", "op": "verify", "case": "B1", "problem": "RuntimeError: no"},
        ]},
        "end_to_end": {"status": "done", "records": [
            {"kind": "pass", "width": 1, "ms": QUANTILES, **RUN},
            {"kind": "pass", "width": 32, "ms": {"median": 12.0}, **RUN},
            {"kind": "step", "mode": "ar", "acceptance_length": 1, "ms": QUANTILES,
             "draft_passes": 0.0, "weight_bytes": 42e9, "kv_bytes": 1, **RUN},
            {"kind": "step", "mode": "fused", "acceptance_length": 4, "ms": {"median": 20.0},
             "draft_passes": 1.0, **RUN},
            {"kind": "look", "drafted": 7, "ms": 0.25, **RUN},
            {"kind": "memory", "peak_bytes": 3 * 2**20, "planned": {"total": 4 * 2**20}, **RUN},
        ]},
        "exact": {"status": "done", "records": [
            {**EXACT, "exact": False, "ms": {"median": 10.0}, "differing_logits": 9}, EXACT
        ]},
    },
}  # fmt: skip


def test_bars_are_computed(module):
    found = {bar.what: (bar.value, bar.is_met) for bar in module("bars").bars(MADE_UP)}
    assert found == {
        "logits_stats N9: share of copy bandwidth": (0.9, True),
        "made-up, CUDA graphs on: AR step / reading the weights": (pytest.approx(1.0), True),
        "made-up, CUDA graphs on: pass of 32 tokens / pass of one": (1.2, False),
        "made-up, exact: logits unlike AR's": (0, True),
    }
    slower = deepcopy(MADE_UP)
    slower["parts"]["kernels"]["records"][0]["gbytes_per_s"] = 3399.0
    slower["parts"]["end_to_end"]["records"][2]["ms"] = {"median": 12.6}
    slower["parts"]["end_to_end"]["records"][1]["ms"] = {"median": 11.5}
    slower["parts"]["exact"]["records"].append({**EXACT, "width": 9, "differing_logits": 1})
    assert [bar.is_met for bar in module("bars").bars(slower)] == [False, False, True, False]


OTHERS = "torch 25.0 (2.50 ×); sort, eager 5.0 (0.50 ×); new: ImportError"
VERSIONS = "torch 2.11, triton 3.6, transformers 5.17, driver 580, CUDA 13.0"


def test_the_report_says_what_was_measured_and_what_was_not(module):
    text = module("report").render(MADE_UP)
    for line in [
        f"Made-up GPU, 2026-01-02, commit aaaaaaa. Python 3.12, {VERSIONS}.",
        "Kernel tests on this device: 2 not reached, 7 passed.",
        "Part tests is not complete: out of time, left out: some.",
        "Part kernels is not complete: out of time, left out: sample N1.",
        "verify B1: RuntimeError: no.",
        "**Bars: 3 met, 1 missed**",
        "| logits_stats N9: share of copy bandwidth | ≥ 0.85 | 0.900 | met |",
        "| made-up, CUDA graphs on: pass of 32 tokens / pass of one | ≤ 1.15 | 1.200 | missed |",
        "| made-up, exact: logits unlike AR's | ≤ 0 | 0 | met |",
        f"| logits_stats N9 | 10.0 (9.0 to 12.0) | 3600 | 90% | 0.1 | - | {OTHERS} |",
        "| linear N512 | 10.0 (9.0 to 12.0), eager | 400 | 10% | 350.0 | 50% |  |",
        "| made-up, on | 7 | 0.250 |",
        "| made-up, on | 10.000 | 12.000 |",
        "| made-up, on, fused | 4 | 20.000 | 1.00 | 200 | 2.00 | - |",
        "| made-up, on | 4 | 3 | 0.75 |",
        "| made-up, exact on | 8 | 15.000 | 1.50 | 0 of 100 | 0 |",
    ]:
        assert line in text.splitlines(), line
    assert "Dry run" not in text
    assert "no speed is judged" not in text
    assert "speed only" in text


@pytest.mark.parametrize(
    "found",
    [
        {"exit_code": 1, "counts": {"passed": 7, "failed": 1}, "failed": ["tests/x.py::a"]},
        {"exit_code": None, "counts": {"passed": 7, "failed": 1}, "failed": ["tests/x.py::a"]},
        {"exit_code": 1, "counts": {"passed": 7}, "failed": []},  # a file that cannot be imported
        {"exit_code": None, "counts": {"not reached": 9}, "failed": []},
        {"problem": "pytest is not installed"},
        None,
    ],
)
def test_no_speed_is_judged_where_kernels_may_be_wrong(module, found):
    doubtful = deepcopy(MADE_UP)
    doubtful["parts"]["tests"]["records"] = [] if found is None else [{"kind": "tests", **found}]
    text = module("report").render(doubtful)
    for line in [
        "no speed is judged",
        "**Bars: 3 not judged, 1 met**",
        "| logits_stats N9: share of copy bandwidth | ≥ 0.85 | 0.900 | not judged |",
        "pass of 32 tokens / pass of one | ≤ 1.15 | 1.200 | not judged |",
        "| made-up, exact: logits unlike AR's | ≤ 0 | 0 | met |",
    ]:
        assert line in text, line


def test_it_goes_between_the_markers_of_a_page(module, tmp_path, monkeypatch):
    report, results, page = module("report"), tmp_path / "gpu.json", tmp_path / "page.md"
    results.write_text(json.dumps(MADE_UP))
    page.write_text("before\n<!-- gpu:begin -->\nold\n<!-- gpu:end -->\nafter\n")
    monkeypatch.setattr(sys, "argv", ["report", str(results), str(page)])
    for _ in range(2):  # the second time changes nothing
        assert report.main() == 0
        text = page.read_text()
        assert text == (
            f"before\n<!-- gpu:begin -->\n\n{report.render(MADE_UP)}\n\n<!-- gpu:end -->\nafter\n"
        )
    page.write_text("no markers\n")
    with pytest.raises(SystemExit):
        report.main()


def test_the_page_of_results_holds_the_committed_run_or_says_that_there_is_none(module):
    report = module("report")
    committed = ROOT / "benchmarks" / "results" / "gpu.json"
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    (match,) = report.BLOCK.finditer(page)
    block = match[0].removeprefix(match[1]).removesuffix(match[2]).strip()
    if committed.is_file():
        assert block == report.render(json.loads(committed.read_text()))
    else:
        assert block == "No GPU has run it yet: there are no numbers."
