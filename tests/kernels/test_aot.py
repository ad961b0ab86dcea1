"""The check that needs no GPU: what it counts, what it refuses, and that our kernels pass."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from repository import ROOT

from hybrid.config import subprocess_environment
from hybrid.errors import KernelUnavailableError
from hybrid.kernels import aot
from hybrid.kernels.aot import AotCase, AotReport, check, compile_case, divisible, occupancy
from hybrid.kernels.dispatch import operations

GOOD = AotReport("op case", 90, 128, shared_bytes=64 * 1024, has_mma=True, wants_mma=True)
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def test_what_is_wrong_with_a_kernel():
    assert check(GOOD) == []
    assert check(replace(GOOD, spills=3)) == ["3 spills of registers"]
    assert check(replace(GOOD, spills=3, spills_allowed=3)) == []
    assert check(replace(GOOD, spills=3, arch=80)) == [], "tiles are chosen for Hopper"
    assert check(replace(GOOD, shared_bytes=227 * 1024)) == []
    assert len(check(replace(GOOD, shared_bytes=227 * 1024 + 1))) == 1
    assert len(check(replace(GOOD, shared_bytes=164 * 1024, arch=80))) == 1
    assert check(replace(GOOD, has_mma=False)) == ["products without tensor cores"]
    assert check(replace(GOOD, has_mma=False, wants_mma=False)) == []
    assert check(replace(GOOD, error="no such thing")) == ["does not compile: no such thing"]


@pytest.mark.parametrize(
    ("num_warps", "registers", "shared", "expected"),
    [
        (4, 32, 0, 1.0),  # 16 blocks of 4 warps
        (4, 128, 0, 16 / 64),  # 65,536 / (128 x 32) = 16 warps
        (4, 255, 0, 8 / 64),  # 256 x 32 registers a warp: 8 warps
        (4, 32, 112 * 1024, 8 / 64),  # two blocks of 113 KiB in 228
        (8, 32, 200 * 1024, 8 / 64),
        (1, 32, 0, 32 / 64),  # 32 blocks are the most
    ],
)
def test_occupancy_by_hand(num_warps, registers, shared, expected):
    assert occupancy(90, num_warps, registers, shared) == expected


def test_divisible_arguments():
    signature = {"p_x": "*bf16", "n": "i32", "scale": "fp32", "count": "i32", "D": "constexpr"}
    assert divisible(signature, but=("count",)) == {
        (0,): [["tt.divisibility", 16]],
        (1,): [["tt.divisibility", 16]],
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is interpreted on a GPU")
def test_nothing_is_compiled_while_kernels_are_interpreted():
    with pytest.raises(KernelUnavailableError, match="unset TRITON_INTERPRET"):
        compile_case(AotCase("case", None, {}, {}), 90)


# A product that fits, one of 512 numbers a thread, and a kernel that is none. Compiled in a process
# that interprets none.
PROBE = """
import json, sys
from dataclasses import asdict
import triton, triton.language as tl
from hybrid.kernels.aot import AotCase, compile_case

@triton.jit
def product(p_a, p_b, p_c, M: tl.constexpr, K: tl.constexpr):
    m, k = tl.arange(0, M), tl.arange(0, K)
    a = tl.load(p_a + m[:, None] * K + k[None, :])
    b = tl.load(p_b + k[:, None] * M + m[None, :])
    tl.store(p_c + m[:, None] * M + m[None, :], tl.dot(a, b))

@triton.jit
def broken(p_a, p_b, p_c, M: tl.constexpr, K: tl.constexpr):
    tl.store(p_c, tl.load(p_a) + no_such_name)

signature = {"p_a": "*bf16", "p_b": "*bf16", "p_c": "*fp32", "M": "constexpr", "K": "constexpr"}
for kernel, m, k in (product, 64, 64), (product, 256, 16), (broken, 16, 16):
    case = AotCase("x", kernel, signature, {"M": m, "K": k}, {"num_warps": 4}, wants_mma=True)
    sys.stdout.write(json.dumps(asdict(compile_case(case, 90))) + "\\n")
"""


def run(command, tmp_path, timeout, **changes):
    environment = subprocess_environment(TRITON_INTERPRET="0", **changes)
    return subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=timeout
    )


@needs_triton
@pytest.mark.slow
def test_the_compiler_is_asked_and_understood(tmp_path):
    (tmp_path / "probe.py").write_text(PROBE)
    done = run([sys.executable, "probe.py"], tmp_path, 100)
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stderr
    fine, spilling, broken = (AotReport(**json.loads(line)) for line in lines)
    assert check(fine) == []
    assert 16 < fine.registers < 256
    assert fine.has_mma
    assert fine.shared_bytes > 0
    assert any("spills" in problem for problem in check(spilling))
    assert "no_such_name" in check(broken)[0]


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_every_kernel_compiles_for_hopper(tmp_path):
    """Cold half a minute, and three at most, then from what was kept."""
    script = ROOT / "benchmarks" / "kernels_aot.py"
    done = run([sys.executable, script, "--arch", "90"], tmp_path, 170)
    assert done.returncode == 0, done.stdout + done.stderr
    for op in operations():
        assert f"\n{op} " in done.stdout
    assert "0 problems" in done.stdout


def test_a_report_is_kept_until_a_source_changes(tmp_path, monkeypatch):
    """And one of a failure is not: the next run asks the compiler again."""
    monkeypatch.setenv("HYBRID_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(aot, "__file__", str(tmp_path / "aot.py"))
    monkeypatch.setattr(aot, "_cases", lambda op: {"a": AotCase("a", None, {}, {})})
    sources = [tmp_path / name for name in ("aot.py", "op/triton.py", "op/reference.py")]
    for path in (*sources, tmp_path / "other" / "triton.py"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x = 1")
    for made, is_kept in ((AotReport("op a", 90, error="no"), False), (GOOD, True)):
        monkeypatch.setattr(aot, "compile_case", lambda case, arch, op, made=made: made)
        assert aot._compile_by_name("op", "a", 90) == made
        kept = aot._kept("op", "a", 90)
        assert kept.is_file() == is_kept
    assert aot.compile_all([90], ["op"]) == [GOOD]
    (tmp_path / "other" / "triton.py").write_bytes(b"x = 2")
    keys = [kept, aot._kept("op", "b", 90), aot._kept("op", "a", 80), aot._kept("other", "a", 90)]
    assert aot._kept("op", "a", 90) == kept, "of another operation nothing is asked"
    for path in sources:
        path.write_bytes(b"x = 2")
        keys.append(aot._kept("op", "a", 90))
    assert len(set(keys)) == len(keys)


ONE_BAD_KERNEL = """
import runpy, sys
import hybrid.kernels.aot as aot
aot.compile_all = lambda archs, ops, workers: [
    aot.AotReport(f"{ops[0]} a", archs[0], 168, 4, 16, 51_456, has_mma=True, occupancy=3 / 16),
    aot.AotReport(f"{ops[0]} b", archs[0], error="no such thing"),
]
script, sys.argv = sys.argv[1], ["x", "swiglu", "--arch", "90"]
runpy.run_path(script, run_name="__main__")
"""


def test_the_script_says_what_kernels_use_and_why_it_fails(tmp_path):
    script = ROOT / "benchmarks" / "kernels_aot.py"
    done = run([sys.executable, "-c", ONE_BAD_KERNEL, str(script)], tmp_path, 60)
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines() == [
        "kernel    arch    registers  spills  shared KiB  tensor cores  occupancy",
        "swiglu a  sm_90         168       4        50.2           yes        19%",
        "swiglu b  sm_90   does not compile",
        "swiglu a, sm_90: 4 spills of registers",
        "swiglu b, sm_90: does not compile: no such thing",
        "2 compiled, 2 problems.",
    ]
