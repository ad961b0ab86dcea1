"""Kept positions of a cache, packed together in place."""

from __future__ import annotations

from torch import Tensor

from hybrid.kernels import dispatch
from hybrid.kernels.cache_gather.reference import cache_gather_reference

__all__ = ["cache_gather"]


def cache_gather(data: Tensor, rows: Tensor, starts: Tensor, keep: Tensor) -> None:
    """Move positions starts + keep of each row to starts, starts + 1, ..., in all layers, in place.

    A tree's accepted path, or the accepted branch of a one-pass step, becomes part of its row.

    Args:
        data: [L, 2, B, G, S, D], as of `KVCache`.
        rows: [R] integers: distinct rows of the cache.
        starts: [R] integers: their committed lengths.
        keep: [R, M] integers: offsets from there, strictly ascending, then -1 to the end. Whoever
            computes them answers for that: nothing is read back from the device to check it.
    """
    if dispatch.choose("cache_gather", data.device) == "reference":
        cache_gather_reference(data, rows, starts, keep)
        return
    from hybrid.kernels.cache_gather.triton import cache_gather_triton

    cache_gather_triton(data, rows, starts, keep)
