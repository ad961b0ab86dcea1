"""Run one part: ``python3 -m benchmarks.gpu.worker PART``. See benchmarks/gpu/run.py."""

from __future__ import annotations

import argparse
import time
from importlib import import_module
from pathlib import Path

import torch

from benchmarks.gpu.run import PARTS
from benchmarks.gpu.session import Session

MODULES = {"tests": "kernel_tests", "kernels": "kernel_times"}  # others are named like their part


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=float, default=300, help="seconds")
    parser.add_argument("--out", type=Path, required=True, help="file")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)  # fails here, and says why, where there is none
    session = Session(device, time.monotonic() + options.limit, options.out)
    session.save("running")
    name = MODULES.get(options.part, options.part)
    import_module(f"benchmarks.gpu.{name}").run(session)
    session.finish()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
