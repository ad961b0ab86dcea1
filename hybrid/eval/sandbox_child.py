"""The other end of hybrid/eval/sandbox.py: a script of the standard library alone.

It reads the job from stdin and writes the outcome to stdout; the code that it runs has neither.
"""

from __future__ import annotations

import json
import math
import os
import sys
from contextlib import suppress
from traceback import walk_tb
from types import TracebackType
from typing import Any

_MAX_REASON = 300  # characters; the outcome stays below what the parent reads


def main() -> None:
    """Run one job."""
    job = json.load(sys.stdin)
    outcome = os.dup(1)  # not inherited by processes that the code starts
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    _limit(**job["limits"])
    line = json.dumps({"reason": _attempt(job["code"], job["tests"])})
    os.write(outcome, line.encode())
    os._exit(0)  # threads that the code left running are not waited for


def _limit(timeout_s: float, memory_mib: int, file_mib: int) -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    for name, most in (
        (resource.RLIMIT_CPU, math.ceil(timeout_s) + 1),
        (resource.RLIMIT_AS, memory_mib * 2**20),
        (resource.RLIMIT_FSIZE, file_mib * 2**20),
        (resource.RLIMIT_CORE, 0),
    ):
        with suppress(ValueError, OSError):  # not every system has every limit
            resource.setrlimit(name, (most, most))


def _attempt(code: str, tests: str) -> str | None:
    """Return why the code or its tests fail, None if they do not."""
    names: dict[str, Any] = {"__name__": "answer"}
    for part, text in (("answer", code), ("tests", tests)):
        try:
            exec(compile(text, f"<{part}>", "exec"), names)
        except BaseException as error:  # noqa: BLE001 - SystemExit is one too
            about = str(error) or _line(text, f"<{part}>", error.__traceback__)
            return f"{part}: {type(error).__name__}: {about}"[:_MAX_REASON]
    return None


def _line(text: str, name: str, trace: TracebackType | None) -> str:
    """Return the line of the text that an error without words came from: a failed assert."""
    numbers = [n for frame, n in walk_tb(trace) if frame.f_code.co_filename == name]
    return text.splitlines()[numbers[-1] - 1].strip() if numbers else ""


if __name__ == "__main__":
    main()
