"""From a fused q, k, v product to rotated queries, and keys and values in the cache."""

from __future__ import annotations

from torch import Tensor

from hybrid.kernels import dispatch
from hybrid.kernels.qkv_rope_append.reference import qkv_rope_append_reference

__all__ = ["qkv_rope_append"]


def qkv_rope_append(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    rows: Tensor,
    slots: Tensor,
    *,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 1e-6,
    query_scale: Tensor | None = None,
) -> Tensor:
    """Normalise and rotate q and k (arXiv:2104.09864), write k and v to the cache, in one pass.

    Everything is computed in float32 and rounded once.

    Args:
        qkv: [N, (H + 2 G) D], the heads of q, then those of k, then those of v.
        cos: [N, D'/2] float32, as of `Rope`; the first D' dimensions of a head are rotated.
        sin: [N, D'/2] float32.
        cache: [2, B, G, S, D], one layer of `KVCache.data`, or pages [2, pages, G, page size, D].
        rows: [N] integers: the row, or the page, that takes the token; -1 writes nothing.
        slots: [N] integers: its position there. No two tokens have the same place.
        norms: weights [D] of the RMS norms of q and k heads, or None.
        eps: of them.
        query_scale: [N] float32 factor on rotated queries, or None.

    Returns:
        Queries [N, H, D] in the dtype of qkv.
    """
    if dispatch.choose("qkv_rope_append", qkv.device) == "reference":
        run = qkv_rope_append_reference
    else:
        from hybrid.kernels.qkv_rope_append.triton import qkv_rope_append_triton as run
    return run(qkv, cos, sin, cache, rows, slots, norms=norms, eps=eps, query_scale=query_scale)
