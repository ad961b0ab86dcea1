"""Attention of T new tokens over cached keys and each other, whoever sees whom: all modes."""

from __future__ import annotations

from torch import Tensor

from hybrid.kernels.dispatch import choose
from hybrid.kernels.hybrid_attention.reference import hybrid_attention_reference
from hybrid.kernels.hybrid_attention.visible import Layout, Visible, lay_out

__all__ = ["Layout", "Visible", "hybrid_attention", "lay_out"]


def hybrid_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Visible,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    by_position: bool = False,
) -> Tensor:
    """Attend; a token that sees nothing gets zeros.

    Args:
        query: [B, T, H, D], any strides but the last; head h reads kv head h // (H / G).
        key: [rows, G, S, D], a view of a cache, the new tokens' keys written; or, where
            `visible` lists pages, [pages, G, page size, D].
        value: like `key`.
        visible: who sees what, and where it lies.
        window: a query at position p sees keys at p - window + 1 and later.
        softcap: scores become softcap * tanh(score / softcap).
        scale: of the scores; 1 / sqrt(D) if None.
        by_position: add up ranges of keys in wide passes too, so that a token has the bits there
            that it has in a narrow one, or alone.

    Returns:
        [B, T, H, D] in the dtype of query.

    Raises:
        ConfigError: shapes, types or strides that do not fit each other, or a gradient is wanted.
        KernelUnavailableError: Triton is forced and cannot run here.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if choose("hybrid_attention", query.device) == "reference":
        return hybrid_attention_reference(query, key, value, visible, window, softcap, scale)
    from hybrid.kernels.hybrid_attention.triton import hybrid_attention_triton

    return hybrid_attention_triton(query, key, value, visible, window, softcap, scale, by_position)
