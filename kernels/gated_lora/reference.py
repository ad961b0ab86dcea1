"""Low-rank updates, each on the tokens that ask for it, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def gated_lora_reference(base: Tensor, x: Tensor, a: Tensor, b: Tensor, ids: Tensor) -> Tensor:
    """Add each token's update, adapter by adapter; see `gated_lora`."""
    wide = torch.promote_types(base.dtype, torch.float32)
    out = base.clone()
    for index in range(len(a)):
        own = (ids == index).nonzero().flatten()
        update = x[own].to(wide) @ a[index].to(wide).T @ b[index].to(wide).T
        out[own] = (base[own].to(wide) + update).to(base.dtype)
    return out
