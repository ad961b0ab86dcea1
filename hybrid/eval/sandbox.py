"""Run Python code that a model wrote, with its tests, in a process of its own with limits.

The limits keep a loop without end, a memory hog or a flood of output from harming the measurement.
They are no wall against malice: the code runs as this user. Next: hybrid/eval/sandbox_child.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from hybrid.config import subprocess_environment

_CHILD = Path(__file__).with_name("sandbox_child.py")
_MAX_OUTCOME = 5000  # characters, more than the script writes
_KEPT = ("PATH", "SYSTEMROOT")  # Windows starts no interpreter without the second


@dataclass(frozen=True, slots=True)
class Limits:
    """What a run may take; where the system has no such limits, the time alone is bounded.

    Attributes:
        timeout_s: wall time, and as much time of the processor.
        memory_mib: address space.
        file_mib: size of a file that it writes.
    """

    timeout_s: float = 10.0
    memory_mib: int = 512
    file_mib: int = 1


def run_tests(code: str, tests: str, limits: Limits | None = None) -> str | None:
    """Run `code`, then `tests` in its namespace; return why that failed, None if it did not.

    The process has an empty folder to work in, the standard library, PATH and no other environment
    variable, no input; its output is thrown away. Processes that it leaves behind are ended.
    """
    limits = limits or Limits()
    with (
        tempfile.TemporaryDirectory(prefix="hybrid-eval-", ignore_cleanup_errors=True) as folder,
        # Files, not pipes: a process that was left behind would keep a pipe open.
        tempfile.TemporaryFile("w+", encoding="utf-8") as job,
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as outcome,
    ):
        json.dump({"code": code, "tests": tests, "limits": asdict(limits)}, job)
        job.seek(0)
        inherited = subprocess_environment()
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(_CHILD)],
            cwd=folder,
            env={name: inherited[name] for name in _KEPT if name in inherited},
            stdin=job,
            stdout=outcome,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a process group of its own
        )
        try:
            exit_code = process.wait(limits.timeout_s)
        except subprocess.TimeoutExpired:
            return f"took more than {limits.timeout_s:g} s"
        finally:
            _end(process)
        outcome.seek(0)
        return _reason(outcome.read(_MAX_OUTCOME), exit_code)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and whatever it started."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):  # nobody is left
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def _reason(outcome: str, exit_code: int) -> str | None:
    try:
        reason = json.loads(outcome)["reason"]
    except (ValueError, KeyError, TypeError):
        return f"ended before its tests did, with exit code {exit_code}"
    return None if reason is None else str(reason)
