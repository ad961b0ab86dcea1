"""What a number depends on besides the code that is measured: versions, machine, commit, date."""

from __future__ import annotations

import platform
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from hybrid import __version__
from hybrid.metrics import peak_rss_mib
from hybrid.revision import git_revision


def describe(device: torch.device) -> dict[str, Any]:
    """Return the environment of this process as JSON types.

    `git_sha` and `is_dirty` are None outside a checkout. `peak_memory_mib` is the most that the
    whole process has held, with every model that is compared in it.
    """
    is_cuda, revision = device.type == "cuda", git_revision()
    return {
        "hybrid": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "git_sha": revision.sha,
        "is_dirty": revision.is_dirty,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "system": f"{platform.system()} {platform.machine()}",
        "device": str(device),
        "gpu": torch.cuda.get_device_name(device) if is_cuda else None,
        "cuda": torch.version.cuda if is_cuda else None,
        "cpu": _cpu_model(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "peak_memory_mib": peak_rss_mib(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
