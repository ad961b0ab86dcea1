"""The gate of an MLP in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu_reference(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up; see `swiglu`."""
    wide = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32))
    gate, up = wide.chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)
