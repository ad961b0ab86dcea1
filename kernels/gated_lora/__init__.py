"""Low-rank updates of a base layer's output, gated token by token."""

from __future__ import annotations

from torch import Tensor

from hybrid.kernels import dispatch
from hybrid.kernels.gated_lora.reference import gated_lora_reference

__all__ = ["gated_lora"]


def gated_lora(base: Tensor, x: Tensor, a: Tensor, b: Tensor, ids: Tensor) -> Tensor:
    """Add each token's low-rank update (arXiv:2106.09685) to what the base layer gave it.

    A token without an adapter keeps its bits, whatever stands beside it.

    Args:
        base: [N, O] outputs of the base layer.
        x: [N, I] its inputs.
        a: [E, R, I] of E adapters; ranks below R are filled up with zeros.
        b: [E, O, R], the scale already in it.
        ids: [N] integers: which adapter, or -1 for none.

    Returns:
        [N, O] in the dtype of base.
    """
    if dispatch.choose("gated_lora", base.device) == "reference":
        return gated_lora_reference(base, x, a, b, ids)
    from hybrid.kernels.gated_lora.triton import gated_lora_triton

    return gated_lora_triton(base, x, a, b, ids)
