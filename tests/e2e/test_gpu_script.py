"""benchmarks/gpu: every part runs (on a CPU, tiny and interpreted), and its report says what is so.

The numbers in here are made up.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import contextmanager
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from repository import ROOT, clean_env

from hybrid.kernels.dispatch import operations

SCRIPT = ROOT / "benchmarks" / "gpu" / "run.sh"
PARTS = ["tests", "ceilings", "kernels", "end_to_end", "exact"]


@pytest.fixture
def module(monkeypatch):
    """Import a module of benchmarks/gpu as run.sh does."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: import_module(f"benchmarks.gpu.{name}")


def run_script(tmp_path, timeout, **settings):
    environment = clean_env(PYTHON=sys.executable, OUT=str(tmp_path), OMP_NUM_THREADS="1")
    done = subprocess.run(
        [str(SCRIPT)], env={**environment, **settings}, capture_output=True, text=True,
        timeout=timeout, cwd=tmp_path,
    )  # fmt: skip
    return done, json.loads((tmp_path / "gpu.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_dry_run_goes_through_every_part(tmp_path):
    done, document = run_script(tmp_path, 220, DEVICE="cpu", LIMIT_S="200")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert [(name, part["status"]) for name, part in document["parts"].items()] == [
        (name, "done") for name in PARTS
    ]
    env = document["environment"]
    assert env["torch"] == torch.__version__
    assert {"git_sha", "triton", "driver", "gpu"} <= set(env)
    tests, ceilings, kernels, end_to_end, exact = (
        part["records"] for part in document["parts"].values()
    )
    assert tests[0]["counts"]["passed"] >= 4
    assert {record["name"] for record in ceilings} >= {"copy", "read, sum"}
    assert {record["op"] for record in kernels} == set(operations())
    assert all(record["bytes"] > 0 and record["others"] for record in kernels)
    assert {record["kind"] for record in end_to_end} == {"pass", "step", "memory"}
    assert {record["mode"] for record in end_to_end if record["kind"] == "step"} == {
        "ar", "two-pass", "fused", "one-pass",
    }  # fmt: skip
    assert {record["graphs"] for record in end_to_end} == {True, False}
    assert all(record["speed_only"] for record in [*end_to_end, *exact])
    assert all(r["differing_logits"] == 0 for r in exact if r["exact"])
    assert any(r["differing_logits"] > 0 for r in exact if not r["exact"]), "the count can fail"
    report = (tmp_path / "gpu.md").read_text()
    assert "no number below means anything" in report
    assert "not judged" in report
    assert " met |" not in report
    assert " missed |" not in report
    assert "speed only" in report
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu.json", "gpu.log", "gpu.md"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about a machine without a GPU")
def test_without_a_gpu_it_fails_and_says_why(tmp_path):
    done, document = run_script(tmp_path, 100, PARTS="ceilings", LIMIT_S="60")
    assert done.returncode == 1, "one part did not finish"
    part = document["parts"]["ceilings"]
    assert (part["status"], part["problem"], part["records"]) == ("failed", "exit code 1", [])
    assert part["log"], "the last lines say why"
    assert "Part ceilings is not complete: failed, exit code 1." in done.stdout


def is_running(pid):
    """Whether there is such a process, one that has ended but is not yet collected left out."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_a_part_that_hangs_is_ended_with_all_that_it_started(module, tmp_path):
    run, log = module("run"), tmp_path / "log"
    child = "import subprocess; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True)"
    started = time.monotonic()
    command = [sys.executable, "-c", f"{child}; p.wait()"]
    assert run.supervise(command, clean_env(), 2.0, log) == ("out of time", "ended after 2 s")
    assert time.monotonic() - started < 20
    assert not is_running(int(log.read_text()))
    assert run.supervise([sys.executable, "-c", "1"], clean_env(), 60, log) == ("done", "")
    bad = [sys.executable, "-c", "raise SystemExit(3)"]
    assert run.supervise(bad, clean_env(), 60, log) == ("failed", "exit code 3")


def test_time_is_shared_and_what_is_left_over_is_left_to_the_rest(module):
    share = module("run").share
    assert share(160, [4, 1, 4, 5, 2]) == 40
    assert share(150, [5]) == 150
    assert share(-3, [4, 1]) == 0


def test_a_part_without_time_is_not_begun(module, tmp_path):
    found = module("run").run_part("kernels", "cpu", 0.0, tmp_path)
    assert (found["status"], found["records"]) == ("out of time", [])
    assert list(tmp_path.iterdir()) == []


def test_what_there_is_no_time_for_is_named(module, tmp_path):
    session_module = module("session")
    cpu = torch.device("cpu")
    session = session_module.Session(cpu, time.monotonic() + 100, tmp_path / "x.json")
    assert list(session.in_time(["a", "b"])) == ["a", "b"]
    session.finish()
    assert json.loads(session.path.read_text())["status"] == "done"
    session.ends = time.monotonic() - 1
    assert list(session.in_time(["c"])) == []
    session.finish()
    written = json.loads(session.path.read_text())
    assert (written["status"], written["left_out"]) == ("out of time", ["c"])


def test_outcomes_of_tests_are_read_off_either_form(module):
    log = """
tests/kernels/test_a.py::test_one[all in place-1] PASSED           [ 12%]
tests/kernels/test_a.py::test_one[all in place-2] FAILED           [ 25%]
[gw1] [ 40%] PASSED tests/kernels/test_b.py::test_two[x y]
[gw0] [ 50%] SKIPPED tests/kernels/test_b.py::test_three
FAILED tests/kernels/test_a.py::test_one[all in place-2] - AssertionError: PASSED it should
"""
    counts, failed = module("kernel_tests").outcomes(log)
    assert counts == {"passed": 2, "failed": 1, "skipped": 1}
    assert failed == ["tests/kernels/test_a.py::test_one[all in place-2]"]


def test_quantiles(module):
    times = module("timing").quantiles([5.0, 1.0, 2.0, 3.0, 4.0, 100.0])
    assert times == {"median": 3.0, "p20": 2.0, "p80": 5.0}


class Clock:
    """Stands in for torch.cuda: a call takes 5 us, a replay of it 4, and the flush is not free."""

    def __init__(self, captures):
        self.now, self.captures, self.log = 0.0, captures, []

    def advance(self, what, microseconds):
        self.log.append(what)
        self.now += microseconds

    def synchronize(self, device=None):
        self.log.append("wait")

    @contextmanager
    def graph(self, graph):
        graph.replay = lambda: self.advance("replay", 4)
        yield
        if not self.captures:
            raise RuntimeError("operation not permitted when stream is capturing")

    CUDAGraph = SimpleNamespace

    def event(self, enable_timing):
        event = SimpleNamespace()
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda end: (end.at - event.at) / 1e3  # ms
        return event

    Event = event


@pytest.mark.parametrize(
    ("captures", "asked", "median", "is_graph"),
    [(True, True, 4.0, True), (False, True, 5.0, False), (True, False, 5.0, False)],
)
def test_a_call_is_timed_alone_and_by_a_graph_where_there_can_be_one(
    module, monkeypatch, captures, asked, median, is_graph
):
    timing, clock = module("timing"), Clock(captures)
    monkeypatch.setattr(torch, "cuda", clock)
    timer = timing.Timer(torch.device("cpu"))
    timer.is_gpu, timer._flush = True, SimpleNamespace(zero_=lambda: clock.advance("flush", 100))
    found = timer(lambda: clock.advance("call", 5), captures=asked)
    times = dict.fromkeys(("median", "p20", "p80"), pytest.approx(median))
    assert found == {**times, "is_graph": is_graph}
    assert clock.log[: timing.WARM_UP] == ["call"] * timing.WARM_UP, "compiled before it is timed"
    timed = "replay" if is_graph else "call"
    assert clock.log[-3:] == ["flush", timed, "wait"]
    assert clock.log.count("flush") == timing.REPEATS


def test_bytes_of_a_case_are_those_of_its_readme(module):
    cases, attention = module("cases"), module("attention_cases")
    found = {str(case): case for case in cases.small_cases(False, 2)}
    assert found["rms_norm N8-C4096"].num_bytes == 4 * 8 * 4096 * 2 + 4096 * 2
    assert found["logits_stats N64-V151936"].num_bytes == 64 * 151_936 * 2
    assert found["verify B8-K7-V49152-block"].num_bytes == 8 * 49_152 * 2 * (15 + 14)
    assert found["verify B8-K7-V49152-rejection"].num_bytes == 8 * 49_152 * 2 * (15 + 2)
    attended = {case.name: case for case in attention.attention_cases(False, 2)}
    decode = attended["decode-8192-B1"]
    assert decode.num_bytes == pytest.approx(33.6e6, rel=0.01), "kernels/hybrid_attention/README.md"
    assert decode.num_flops == 4 * 32 * 128 * 8193
    judged = [str(case) for case in (*found.values(), *attended.values()) if case.bar]
    assert "hybrid_attention decode-8192-B8" in judged
    assert "logits_stats N1024-V49152" in judged


QUANTILES = {"median": 10.0, "p20": 9.0, "p80": 12.0}
RUN = {"model": "made-up", "graphs": True, "speed_only": True}
MADE_UP = {
    "kind": "gpu",
    "settings": {"device": "cuda", "parts": PARTS, "limit_s": 450},
    "environment": {
        "gpu": "Made-up GPU", "cpu": "x", "date": "2026-01-02T00:00:00", "git_sha": "a" * 40,
        "is_dirty": False, "python": "3.12", "torch": "2.11", "triton": "3.6",
        "transformers": "5.17", "driver": "580", "cuda": "13.0",
    },
    "parts": {
        "tests": {"status": "failed", "problem": "exit code 1", "records": [
            {"kind": "tests", "counts": {"passed": 7, "failed": 1}, "failed": ["tests/x.py::a"]},
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
                        "sort": {"median": 5.0, "is_graph": False}}},
            {"kind": "kernel", "op": "verify", "case": "B1", "problem": "RuntimeError: no"},
        ]},
        "end_to_end": {"status": "done", "records": [
            {"kind": "pass", "width": 1, "ms": QUANTILES, **RUN},
            {"kind": "pass", "width": 32, "ms": {"median": 12.0}, **RUN},
            {"kind": "step", "mode": "ar", "acceptance_length": 1, "ms": QUANTILES,
             "draft_passes": 0.0, "weight_bytes": 42e9, "kv_bytes": 1, **RUN},
            {"kind": "step", "mode": "fused", "acceptance_length": 4, "ms": {"median": 20.0},
             "draft_passes": 1.0, **RUN},
            {"kind": "memory", "peak_bytes": 3 * 2**20, "planned": {"total": 4 * 2**20}, **RUN},
        ]},
        "exact": {"status": "done", "records": [
            {"kind": "exact", "model": "made-up", "exact": exact, "width": 8, "logits": 100,
             "ms": {"median": median}, "differing_logits": n, "differing_choices": 0}
            for exact, median, n in ((False, 10.0, 9), (True, 15.0, 0))
        ]},
    },
}  # fmt: skip


def test_bars_are_computed(module):
    found = {bar.what: (bar.value, bar.is_met) for bar in module("bars").bars(MADE_UP)}
    assert found == {
        "logits_stats N9: share of copy bandwidth": (0.9, True),
        "made-up, CUDA graphs on: AR step / reading the weights": (pytest.approx(1.0), True),
        "made-up, CUDA graphs on: pass of 32 tokens / pass of one": (1.2, False),
    }
    slower = deepcopy(MADE_UP)
    slower["parts"]["kernels"]["records"][0]["gbytes_per_s"] = 3399.0
    slower["parts"]["end_to_end"]["records"][2]["ms"] = {"median": 12.6}
    slower["parts"]["end_to_end"]["records"][1]["ms"] = {"median": 11.5}
    assert [bar.is_met for bar in module("bars").bars(slower)] == [False, False, True]


OTHERS = "torch 25.0 (2.50 ×); sort, eager 5.0 (0.50 ×)"
VERSIONS = "torch 2.11, triton 3.6, transformers 5.17, driver 580, CUDA 13.0"


def test_the_report_says_what_was_measured_and_what_was_not(module):
    text = module("report").render(MADE_UP)
    for line in [
        f"Made-up GPU, 2026-01-02, commit aaaaaaa. Python 3.12, {VERSIONS}.",
        "Kernel tests on this device: 1 failed, 7 passed. Failed: tests/x.py::a.",
        "Part tests is not complete: failed, exit code 1.",
        "Part kernels is not complete: out of time, left out: sample N1.",
        "verify B1: RuntimeError: no.",
        "| logits_stats N9: share of copy bandwidth | ≥ 0.85 | 0.900 | met |",
        "| made-up, CUDA graphs on: pass of 32 tokens / pass of one | ≤ 1.15 | 1.200 | missed |",
        f"| logits_stats N9 | 10.0 (9.0 to 12.0) | 3600 | 90% | 0.1 | {OTHERS} |",
        "| made-up, on | 10.000 | 12.000 |",
        "| made-up, on, fused | 4 | 20.000 | 1.00 | 200 | 2.00 | - |",
        "| made-up, on | 4 | 3 | 0.75 |",
        "| made-up, exact on | 8 | 15.000 | 1.50 | 0 of 100 | 0 |",
    ]:
        assert line in text.splitlines(), line
    assert "Dry run" not in text
    assert "speed only" in text


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
