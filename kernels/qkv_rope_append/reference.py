"""Norms, rotation and cache rows of a fused q, k, v product, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def qkv_rope_append_reference(
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
    """Return rotated queries, write keys and values; see `qkv_rope_append`."""
    num_groups, head_dim = cache.shape[2], cache.shape[4]
    num_all = qkv.shape[1] // head_dim
    wide = qkv.to(torch.promote_types(qkv.dtype, torch.float32))
    heads = wide.reshape(len(qkv), num_all, head_dim)
    query, key, value = heads.tensor_split([num_all - 2 * num_groups, num_all - num_groups], dim=1)
    if norms is not None:
        query, key = _normalised(query, norms[0], eps), _normalised(key, norms[1], eps)
    query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
    if query_scale is not None:
        query = query * query_scale[:, None, None]
    kept = (rows >= 0).nonzero().flatten()
    for half, states in zip(cache, (key, value), strict=True):  # [B, G, S, D], [N, G, D]
        half[rows[kept].long(), :, slots[kept].long()] = states[kept].to(cache.dtype)
    return query.to(qkv.dtype)


def _normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first dimensions of heads [N, H, D] by angles [N, D'/2]; the others pass."""
    half = cos.shape[1]
    first, second, rest = x.tensor_split([half, 2 * half], dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = [first * cos - second * sin, second * cos + first * sin, rest]
    return torch.cat(turned, dim=-1)
