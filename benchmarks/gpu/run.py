"""Run the parts one after the other, each in a process of its own; write what they found.

A part that crashes, hangs or takes its GPU with it leaves what it had written, and the others.
This process imports neither torch nor the project. Next: benchmarks/gpu/worker.py.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PARTS = {  # in this order; their shares of the time, which whoever is early leaves to the rest
    "tests": 5,
    "ceilings": 1,
    "kernels": 4,
    "end_to_end": 5,
    "exact": 2,
}
GRACE_S = 15  # to finish what was begun, before it is ended
TAIL = 40  # lines of a failed part's output


def main() -> int:
    """Return the number of parts that did not finish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="cpu is a dry run")
    parser.add_argument("--parts", default="all", help=f"of {','.join(PARTS)}")
    parser.add_argument("--limit", type=float, default=450, help="seconds for all parts")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    options = parser.parse_args()
    parts = list(PARTS) if options.parts == "all" else options.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--parts: got {', '.join(unknown)}, expected some of {', '.join(PARTS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu.log").unlink(missing_ok=True)
    ends = time.monotonic() + options.limit
    document: dict[str, Any] = {
        "kind": "gpu",
        "settings": {"device": options.device, "parts": parts, "limit_s": options.limit},
        "parts": {},
    }
    for index, part in enumerate(parts):
        limit = share(ends - time.monotonic(), [PARTS[name] for name in parts[index:]])
        found = run_part(part, options.device, limit, options.out)
        document.setdefault("environment", found.get("environment"))
        document["parts"][part] = found
        (options.out / "gpu.json").write_text(json.dumps(document, indent=1) + "\n")
        print(f"{part}: {found['status']} after {found['seconds']:.0f} s", flush=True)
    _report(options.out)
    return sum(found["status"] != "done" for found in document["parts"].values())


def share(left_s: float, weights: list[int]) -> float:
    """Return the seconds of the first of the parts that are still to run."""
    return max(left_s, 0.0) * weights[0] / sum(weights)


def run_part(part: str, device: str, limit_s: float, out: Path) -> dict[str, Any]:
    """Run one part and return what it wrote.

    Its `status` is "done", "out of time" (it left something out, or was ended) or "failed".
    """
    if limit_s <= 0:
        return {"status": "out of time", "problem": "not begun", "records": [], "seconds": 0.0}
    path, log = out / f"{part}.json", out / "gpu.log"
    path.unlink(missing_ok=True)
    before = log.stat().st_size if log.is_file() else 0
    command = [sys.executable, "-m", "benchmarks.gpu.worker", part, "--device", device]
    command += ["--limit", f"{limit_s:.1f}", "--out", str(path)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    started = time.monotonic()
    status, problem = supervise(command, environment, limit_s + GRACE_S, log)
    found: dict[str, Any] = {"records": []}
    if path.is_file():
        found = json.loads(path.read_text())
        path.unlink()
    if problem:
        printed = log.read_bytes()[before:].decode(errors="replace")
        found |= {"status": status, "problem": problem, "log": printed.splitlines()[-TAIL:]}
        print(*found["log"], sep="\n")
    found["seconds"] = round(time.monotonic() - started, 1)
    return found


def supervise(
    command: list[str], environment: dict[str, str], limit_s: float, log: Path
) -> tuple[str, str]:
    """Run a command and end it, with all that it started, after `limit_s` seconds.

    What it prints is added to `log`.

    Returns:
        What became of it and why, the reason empty where all is well.
    """
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return "out of time", f"ended after {limit_s:.0f} s"
        finally:
            _end(process)
    return ("failed", f"exit code {code}") if code else ("done", "")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part and whatever it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _report(out: Path) -> None:
    """Print the tables; without the project's packages there is the JSON alone."""
    command = [sys.executable, "-m", "benchmarks.gpu.report", str(out / "gpu.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    (out / "gpu.md").write_text(done.stdout)
    print(done.stdout or done.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
