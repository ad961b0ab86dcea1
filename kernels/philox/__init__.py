"""Uniform numbers from a seed and a place in its stream, on the device that needs them."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid.kernels import dispatch
from hybrid.kernels.checks import require, require_dtype, require_tensor
from hybrid.kernels.philox.reference import philox_reference

__all__ = ["philox"]


def philox(seeds: Tensor, offsets: Tensor, count: int) -> Tensor:
    """Return the numbers offset ... offset + count - 1 of each row's stream.

    Philox4x32-10 (Salmon et al. 2011, doi:10.1145/2063384.2063405): number i of a stream is a
    function of (seed, i) alone, so a row that took n numbers goes on at offset + n, whatever other
    rows do, and nothing is kept on the device but two integers.

    Args:
        seeds: [B] int64, one stream per row.
        offsets: [B] int64, at least 0.
        count: numbers per row.

    Returns:
        [B, count] float64, multiples of 2**-53 in [0, 1).

    Raises:
        ConfigError: shapes, dtypes or devices do not match.
    """
    require(count >= 0, "philox", f"count is {count}, expected at least 0.")
    for name, tensor in (("seeds", seeds), ("offsets", offsets)):
        require_tensor("philox", name, tensor, (seeds.numel(),), seeds.device)
        require_dtype("philox", name, tensor, torch.int64)
    if dispatch.choose("philox", seeds.device) == "reference":
        return philox_reference(seeds, offsets, count)
    from hybrid.kernels.philox.triton import philox_triton

    return philox_triton(seeds, offsets, count)
