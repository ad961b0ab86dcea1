"""Compile every kernel for GPUs that are not here; print what each uses; 1 if one is no good."""

from __future__ import annotations

import argparse
import os

from hybrid.errors import KernelUnavailableError
from hybrid.kernels.aot import SHARED_PER_BLOCK, TARGET, AotReport, check, compile_all


def main() -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ops", nargs="*", help="operations, all if none is named")
    known = sorted(SHARED_PER_BLOCK)
    parser.add_argument("--arch", type=int, action="append", choices=known, help="90 for sm_90")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    try:
        reports = compile_all(options.arch or [TARGET, 80, 100], options.ops, options.workers)
    except KernelUnavailableError as error:
        print(error)
        return 1
    width = max(len(report.name) for report in reports)
    print(f"{'kernel':<{width}}  arch    registers  spills  shared KiB  tensor cores  occupancy")
    for report in reports:
        print(_row(report, width))
    problems = [f"{r.name}, sm_{r.arch}: {problem}" for r in reports for problem in check(r)]
    print(*problems, f"{len(reports)} compiled, {len(problems)} problems.", sep="\n")
    return 1 if problems else 0


def _row(report: AotReport, width: int) -> str:
    start = f"{report.name:<{width}}  sm_{report.arch:<4}"
    if report.error:
        return f"{start} does not compile"
    numbers = f"{report.registers:>9}  {report.spills:>6}  {report.shared_bytes / 1024:>10.1f}"
    return f"{start} {numbers}  {'yes' if report.has_mma else '-':>12}  {report.occupancy:>9.0%}"


if __name__ == "__main__":
    raise SystemExit(main())
