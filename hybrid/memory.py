"""What a request will hold in memory, known before its first token."""

from __future__ import annotations

from pathlib import Path

import torch

from hybrid.errors import CapacityError


def available_bytes(device: torch.device) -> int | None:
    """Return the free memory of `device`, or None where the system does not tell."""
    if device.type == "cuda":
        # What torch's allocator keeps for itself is free for us.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if found is None else int(found) * 1024


def require_memory(num_bytes: int, device: torch.device, what: str) -> None:
    """Refuse up front what would die half-way.

    Raises:
        CapacityError: `num_bytes` are not free.
    """
    free = available_bytes(device)
    if free is not None and num_bytes > free:
        raise CapacityError(
            f"{what} needs {num_bytes / 2**20:.0f} MiB, {device} has {free / 2**20:.0f} MiB free. "
            "Use fewer prompts at once, a shorter context, or a smaller dtype "
            "(`hybrid plan-memory` shows the parts)."
        )
