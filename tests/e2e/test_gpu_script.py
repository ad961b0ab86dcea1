"""benchmarks/gpu: every part runs (on a CPU, tiny and interpreted), and is timed as it says."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from reads import deciding_on_device
from repository import ROOT, clean_env

from hybrid.kernels.dispatch import operations

SCRIPT = ROOT / "benchmarks" / "gpu" / "run.sh"
PARTS = ["tests", "ceilings", "kernels", "end_to_end", "exact"]


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
    assert not [r for r in kernels for other in r["others"].values() if "problem" in other]
    assert {record["kind"] for record in end_to_end} == {"pass", "step", "look", "memory"}
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
    child = int(log.read_text())
    while is_running(child) and time.monotonic() - started < 20:
        time.sleep(0.05)  # its end takes a moment
    assert not is_running(child)
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
collecting ... collected 9 items / 3 deselected / 6 selected
tests/kernels/test_a.py::test_one[all in place-1] PASSED           [ 12%]
tests/kernels/test_a.py::test_one[all in place-2] FAILED           [ 25%]
[gw1] [ 40%] PASSED tests/kernels/test_b.py::test_two[x y]
[gw0] [ 50%] SKIPPED tests/kernels/test_b.py::test_three
FAILED tests/kernels/test_a.py::test_one[all in place-2] - AssertionError: PASSED it should
"""
    counts, failed = module("kernel_tests").outcomes(log)
    assert counts == {"passed": 2, "failed": 1, "skipped": 1, "not reached": 2}
    assert failed == ["tests/kernels/test_a.py::test_one[all in place-2]"]


KERNEL_FILE = """
import pytest
@pytest.mark.parametrize("dtype", ["torch.float32", "torch.bfloat16"])
def test_x(dtype):
    assert {passes}
"""
MARKED = "import pytest\npytestmark = pytest.mark." + "gpu\ndef test_m(): pass\n"


def test_bfloat16_runs_first_and_what_is_not_reached_is_no_pass(module, tmp_path):
    files = {
        "kernels/test_a.py": KERNEL_FILE.format(passes=True),
        "kernels/test_hybrid_attention.py": KERNEL_FILE.format(passes=True),
        "kernels/test_verify.py": KERNEL_FILE.format(passes="dtype == 'torch.bfloat16'"),
        "unit/test_marked.py": MARKED,
        "unit/test_other.py": "def test_o(): pass\n",
    }
    for name, text in files.items():
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / name).write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    command = [sys.executable, "-m", "pytest", "-vv", "-x", "-p", "benchmarks.gpu.order", "tests"]
    environment = clean_env(PYTHONPATH=str(ROOT))
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    ran = [line.split()[0].split("/test_")[1] for line in done.stdout.splitlines() if "%]" in line]
    assert ran == [
        "hybrid_attention.py::test_x[torch.bfloat16]",
        "verify.py::test_x[torch.bfloat16]",
        "a.py::test_x[torch.bfloat16]",
        "marked.py::test_m",
        "hybrid_attention.py::test_x[torch.float32]",
        "verify.py::test_x[torch.float32]",
    ]
    counts, failed = module("kernel_tests").outcomes(done.stdout)
    assert counts == {"passed": 5, "failed": 1, "not reached": 1}
    assert failed == ["tests/kernels/test_verify.py::test_x[torch.float32]"]


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("@pytest.mark.{}\ndef test_a(): ...", True),
        ("pytestmark = [pytest.mark.slow, pytest.mark.{}]", True),
        ("pytest.param(1, marks=[mark.{}])", True),
        ("pytest.mark.{}_free", False),
        ("", False),
    ],
)
def test_files_with_something_for_a_gpu_are_found(module, monkeypatch, tmp_path, text, is_found):
    tests = module("kernel_tests")
    path = tmp_path / "tests" / "unit" / "test_x.py"
    path.parent.mkdir(parents=True)
    path.write_text(text.format("gpu"))
    monkeypatch.setattr(tests, "ROOT", tmp_path)
    assert tests.others_for_a_gpu() == [str(path)] * is_found


def test_the_files_of_kernels_that_are_named_exist(module):
    names = {path.stem for path in (ROOT / "tests" / "kernels").glob("test_*.py")}
    assert names >= set(module("order").FIRST)
    assert names >= {f"test_{name}" for name in module("kernel_tests").WITHOUT_KERNELS}


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


def test_what_attention_is_compared_with_computes_the_same(module):
    maker = module("cases").Maker(torch.device("cpu"), torch.float32, 0)
    for case in module("attention_cases").attention_cases(True, 4):
        made = case.make(maker)
        wanted = made.kernel().transpose(1, 2)  # [B, H, T, D]
        for name, call in made.others.items():
            assert torch.allclose(call(), wanted, atol=1e-5), (case.name, name)
        assert ("torch, lower right" in made.others) == case.name.startswith("verify")


def test_a_look_is_one_at_a_draft_of_the_adapter(module, monkeypatch):
    looks = []

    def read(tensors):
        looks.append(tensors["confidence"].shape)

    monkeypatch.setattr("hybrid.decode.timing.read", read)
    end_to_end, models = module("end_to_end"), module("random_models")
    draw = torch.Generator().manual_seed(0)
    backbone = models.backbone_of(models.DRY_SHAPES["tiny"], draw, torch.float32)
    with deciding_on_device():
        (record,) = end_to_end.measure_looks(backbone, end_to_end.DRY_SCALE)
    assert (record["kind"], record["drafted"]) == ("look", 7)
    assert set(looks) == {(1, 7)}
    assert len(looks) > end_to_end.DRY_SCALE.num_steps


def test_a_competitor_that_raises_costs_its_own_number_alone(module, monkeypatch, tmp_path):
    times, cases = module("kernel_times"), module("cases")

    def fails():
        raise NotImplementedError("no such kernel")

    case = cases.philox_case(2, 4)
    make = case.make
    monkeypatch.setattr(times.dispatch, "last", lambda op: "triton")
    cpu = torch.device("cpu")
    session = module("session").Session(cpu, time.monotonic() + 100, tmp_path / "x.json")

    def with_another(maker):
        made = make(maker)
        return replace(made, kernel=made.others["torch"], others={"bad": fails, **made.others})

    found = times.time_case(replace(case, make=with_another), session, times.Timer(cpu))
    assert found["others"]["bad"] == {"problem": "NotImplementedError: no such kernel"}
    assert found["others"]["torch"]["median"] > 0
    assert found["microseconds"]["median"] > 0
