"""What a request will hold in memory, known before its first token."""

from __future__ import annotations

from pathlib import Path

import torch

from hybrid.errors import CapacityError
from hybrid.models.adapter import DiffusionAdapter
from hybrid.models.graphs import bucket
from hybrid.protocols import Backbone


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


def planned_bytes(
    backbone: Backbone, adapter: DiffusionAdapter | None, batch: int, max_seq_len: int, width: int
) -> dict[str, int]:
    """Return the bytes that decoding will hold, by part and in total.

    Args:
        backbone: the model.
        adapter: of its drafts.
        batch: rows.
        max_seq_len: prompt and answer together.
        width: the most tokens of a row in one pass that gives logits.
    """
    chunk = min(backbone.prefill_chunk, max_seq_len)
    itemsize = backbone.dtype.itemsize
    heads = getattr(getattr(backbone, "spec", None), "num_heads", 1)
    # The largest of what a pass holds besides weights and cache: logits in float32 for the
    # transforms, or a prefill chunk's mask and activations.
    logits = batch * width * backbone.vocab_size * (itemsize + 4)
    if getattr(backbone, "graphs", None) is not None:
        # Those of a recorded pass, and the place for what records return.
        logits += 2 * bucket(batch) * bucket(width) * backbone.vocab_size * itemsize
    mask = 0 if getattr(backbone, "runs_kernels", False) else heads * max_seq_len
    prefill = chunk * (mask + 8 * backbone.hidden_size) * itemsize
    parts = {
        "weights": backbone.weight_nbytes,
        "adapter": adapter.nbytes if adapter is not None else 0,
        "kv_cache": backbone.cache_nbytes(batch, max_seq_len + width),
        "workspace": max(logits, prefill),
    }
    return {**parts, "total": sum(parts.values())}
