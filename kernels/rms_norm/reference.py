"""RMS norm, with or without a sum before it, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_reference(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the norm of x + residual and the sum itself; see `rms_norm`."""
    total = x if residual is None else x + residual
    wide = total.to(torch.promote_types(total.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * weight
    return normed.to(x.dtype), total
