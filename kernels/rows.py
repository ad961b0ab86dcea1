"""Numbers that each row of a batch may have of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid.kernels.checks import require, require_tensor


def require_logits(op: str, logits: Tensor) -> None:
    """Check that logits are [N, V], float and not empty in V.

    Raises:
        ConfigError: they are not.
    """
    found = f"logits are {list(logits.shape)} {logits.dtype}"
    fits = logits.ndim == 2 and logits.shape[1] > 0 and logits.dtype.is_floating_point
    require(fits, op, f"{found}, expected [N, V] floats, V at least 1.")


def per_row(op: str, name: str, value: float | Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return one number per row of `like` [N, ...], where that lies.

    Args:
        op: for the error's message.
        name: of the argument, likewise.
        value: one number for all rows, or [N] on the device of `like`.
        like: whose rows they are.
        dtype: of the result.

    Returns:
        [N].

    Raises:
        ConfigError: a tensor of another shape or on another device.
    """
    shape = (like.shape[0],)
    if not isinstance(value, Tensor):
        return torch.full(shape, value, dtype=dtype, device=like.device)
    require_tensor(op, name, value, shape, like.device)
    return value.to(dtype).contiguous()
