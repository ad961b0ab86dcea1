"""What a part is given, and where it writes what it finds, record by record.

Next: benchmarks/gpu/timing.py.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch

from hybrid.bench.environment import describe

Item = TypeVar("Item")

SEED = 0  # of every random tensor


@dataclass
class Session:
    """One part on one device.

    Attributes:
        device: where it runs.
        ends: `time.monotonic()` at which nothing new is begun.
        path: of its JSON.
        records: what it found, each with a "kind".
        left_out: what there was no time for.
    """

    device: torch.device
    ends: float
    path: Path
    records: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def is_dry(self) -> bool:
        """Whether this is a CPU: tiny shapes, one repetition, times that say nothing."""
        return self.device.type == "cpu"

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations; the interpreter is wrong in bfloat16."""
        return torch.float32 if self.is_dry else torch.bfloat16

    def in_time(self, items: Iterable[Item], name: Any = str) -> Iterator[Item]:
        """Hand out items while there is time, note the others by name."""
        for item in items:
            if time.monotonic() < self.ends:
                yield item
            else:
                self.left_out.append(name(item))
        self.save("running")

    def add(self, **record: Any) -> None:
        """Keep a record and write all of them."""
        self.records.append(record)
        print(json.dumps(record))
        self.save("running")

    def save(self, status: str) -> None:
        """Write the part's JSON."""
        document = {
            "status": status,
            "environment": environment(self.device),
            "seed": SEED,
            "records": self.records,
            "left_out": self.left_out,
        }
        self.path.write_text(json.dumps(document, indent=1) + "\n")

    def finish(self) -> None:
        """Write it for the last time."""
        self.save("out of time" if self.left_out else "done")

    def generator(self) -> torch.Generator:
        """Return a generator on the device, the same each time."""
        return torch.Generator(self.device).manual_seed(SEED)


_environment: dict[str, Any] = {}


def environment(device: torch.device) -> dict[str, Any]:
    """Return versions, GPU, driver and commit, as of the first call."""
    if not _environment:
        _environment.update(describe(device), triton=_version("triton"), driver=None)
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            _environment.update(
                driver=_driver(),
                gpu_memory_bytes=properties.total_memory,
                num_multiprocessors=properties.multi_processor_count,
                l2_bytes=properties.L2_cache_size,
                capability=f"{properties.major}.{properties.minor}",
            )
    return _environment


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return (done.stdout.split() or [None])[0]
