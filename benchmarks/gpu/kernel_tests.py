"""The kernels' tests, compiled, and what else is marked for a GPU: bfloat16 is among them.

What matters most runs first (benchmarks/gpu/order.py). Next: benchmarks/gpu/ceilings.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu.session import Session

ROOT = Path(__file__).resolve().parents[2]
NOT_REACHED = "not reached"
OUTCOMES = "PASSED|FAILED|ERROR|SKIPPED|XFAIL"
FORMS = (  # of one process; of several, and of the summary
    re.compile(rf"^(?P<test>tests/\S+?::.+?) (?P<outcome>{OUTCOMES})\b"),
    re.compile(rf"\b(?P<outcome>{OUTCOMES}) (?P<test>tests/\S+?::.+?)(?: - .*)?$"),
)
MARK = re.compile(r"\bmark\.gpu\b")  # of a test, a file (in a list or not) or a parameter
COLLECTED = re.compile(r"\bcollected (\d+) items?\b(?:.*/ (\d+) selected)?")
WITHOUT_KERNELS = ("aot", "block_attention", "kernels_page")  # files with nothing for a GPU
MAX_WORKERS = 16
SHOWN = 400  # last lines of tests that fail


def run(session: Session) -> None:
    """Run them and count outcomes, also of what ran before the time was up."""
    if find_spec("pytest") is None:
        session.add(kind="tests", problem="pytest is not installed: no kernel has been checked")
        session.left_out.append("all tests")
        return
    tests = ["tests/kernels/test_philox.py", "-k", "stream or draws"]
    if not session.is_dry:
        ignored = [f"--ignore=tests/kernels/test_{name}.py" for name in WITHOUT_KERNELS]
        tests = ["tests/kernels", *others_for_a_gpu(), *ignored]
    options = ["-vv", "--color=no", "-p", "no:cacheprovider", "-p", "benchmarks.gpu.order"]
    options.append("--continue-on-collection-errors")
    command = [sys.executable, "-m", "pytest", *tests, *options]
    if find_spec("xdist") is not None and not session.is_dry:
        command += ["-n", str(min(MAX_WORKERS, os.cpu_count() or 1))]
    limit = max(session.ends - time.monotonic(), 1.0)
    code: int | None = None
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        try:
            done = subprocess.run(
                command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=limit
            )
            code = done.returncode
        except subprocess.TimeoutExpired:
            session.left_out.append(f"the tests that were {NOT_REACHED} in time")
        file.seek(0)
        log = file.read()
    counts, failed = outcomes(log)
    session.add(kind="tests", exit_code=code, counts=counts, failed=failed)
    if failed or code not in (None, 0):
        print(*log.splitlines()[-SHOWN:], sep="\n")
        raise SystemExit(1)


def others_for_a_gpu() -> list[str]:
    """Return the test files outside tests/kernels in which something is marked for a GPU."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    marked = [path for path in files if MARK.search(path.read_text(encoding="utf-8"))]
    return [str(path) for path in marked if path.parent.name != "kernels"]


def outcomes(log: str) -> tuple[dict[str, int], list[str]]:
    """Return {outcome: number} and the tests that failed, from the lines of a verbose run.

    A test that fails has a second line, in the summary. One without a line was not reached.
    """
    found: dict[str, str] = {}
    for line in log.splitlines():
        for form in FORMS:
            if match := form.search(line):
                found[match["test"]] = match["outcome"].lower()
                break
    failed = [test for test, outcome in found.items() if outcome in ("failed", "error")]
    counts = Counter(found.values())
    if collected := COLLECTED.search(log):
        counts[NOT_REACHED] = int(collected[2] or collected[1]) - len(found)
    return dict(+counts), failed
