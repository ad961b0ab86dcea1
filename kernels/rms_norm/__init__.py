"""RMS norm of a sum."""

from __future__ import annotations

from torch import Tensor

from hybrid.kernels import dispatch
from hybrid.kernels.rms_norm.reference import rms_norm_reference

__all__ = ["rms_norm"]


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Normalise x + residual over its last dimension (arXiv:1910.07467).

    The sum is rounded to the dtype of x first: it is what the next layer will read, too.

    Args:
        x: [..., C].
        weight: [C], None is all ones.
        eps: added to the mean square.
        residual: [..., C] in the dtype of x, or None.

    Returns:
        The norm and the sum, both [..., C] in the dtype of x; without a residual the sum is x.
    """
    if dispatch.choose("rms_norm", x.device) == "reference":
        return rms_norm_reference(x, weight, eps, residual)
    from hybrid.kernels.rms_norm.triton import rms_norm_triton

    return rms_norm_triton(x, weight, eps, residual)
