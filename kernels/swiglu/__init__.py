"""The gate of an MLP."""

from __future__ import annotations

from torch import Tensor

from hybrid.kernels import dispatch
from hybrid.kernels.swiglu.reference import swiglu_reference

__all__ = ["swiglu"]


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up (arXiv:2002.05202), rounded once.

    Args:
        gate_up: [N, 2 I], gate and up side by side, as one fused product gives them.

    Returns:
        [N, I] in the dtype of gate_up.
    """
    if dispatch.choose("swiglu", gate_up.device) == "reference":
        return swiglu_reference(gate_up)
    from hybrid.kernels.swiglu.triton import swiglu_triton

    return swiglu_triton(gate_up)
