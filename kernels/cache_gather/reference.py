"""Packing kept cache positions together, row by row, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor


def cache_gather_reference(data: Tensor, rows: Tensor, starts: Tensor, keep: Tensor) -> None:
    """Move each row's kept positions to its start; see `cache_gather`."""
    for row, start, offsets in zip(rows.tolist(), starts.tolist(), keep, strict=True):
        kept = offsets[offsets >= 0]
        own = data[:, :, row]  # [L, 2, G, S, D]
        # index_select copies, so a kept position cannot be overwritten before it is read.
        own[:, :, :, start : start + len(kept)] = own.index_select(3, kept.long() + start)
