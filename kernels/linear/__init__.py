"""A product whose rows are each a product of their own, bit for bit."""

from __future__ import annotations

from torch import Tensor

from hybrid.kernels import dispatch
from hybrid.kernels.linear.reference import TILE_ROWS, in_tiles, linear_reference

__all__ = ["TILE_ROWS", "in_tiles", "linear"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b; the bits of a row do not depend on the other rows, nor on their number.

    Args:
        x: [N, I].
        weight: [O, I] in the dtype of x.
        bias: [O] in the dtype of x, or None. Added before the one rounding.

    Returns:
        [N, O] in the dtype of x.

    Raises:
        ConfigError: shapes, types or devices that do not match.
        KernelUnavailableError: Triton is forced and cannot run here, or it interprets bfloat16.
    """
    if dispatch.choose("linear", x.device) == "reference":
        return linear_reference(x, weight, bias)
    from hybrid.kernels.linear.triton import linear_triton

    return linear_triton(x, weight, bias)
