"""Block attention on PyTorch's scaled_dot_product_attention, and its obvious float64 twin."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def block_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attend with grouped heads, without copying keys for each query head.

    Args:
        query: [T, H, D]; query head h reads kv head h // (H / G).
        key: [G, P + T, D].
        value: [G, P + T, D].
        mask: [H / G * T, P + T] additive, in the dtype of query; row r * T + t is token t. None:
            everything is visible.

    Returns:
        [T, H * D].
    """
    num_tokens, num_heads, head_dim = query.shape
    num_groups = key.shape[0]
    if num_tokens == 1:
        grouped = query.view(1, num_groups, num_heads // num_groups, head_dim)
        out = F.scaled_dot_product_attention(grouped, key[None], value[None], attn_mask=mask)
        return out.reshape(1, num_heads * head_dim)
    # Query heads of one kv head become rows of one matrix: [G, (H/G) T, D].
    grouped = query.transpose(0, 1).reshape(1, num_groups, -1, head_dim)
    out = F.scaled_dot_product_attention(grouped, key[None], value[None], attn_mask=mask)
    # reshape: some of torch's kernels return another memory order.
    return out.reshape(num_heads, num_tokens, head_dim).transpose(0, 1).reshape(num_tokens, -1)


def dense_mask_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Compute the same in float64, head by head; the twin that tests compare with.

    Args:
        query: [T, H, D].
        key: [G, P + T, D].
        value: [G, P + T, D].
        mask: [T, P + T] boolean.

    Returns:
        [T, H * D] float64.
    """
    num_heads, head_dim = query.shape[1:]
    per_group = num_heads // key.shape[0]
    heads = []
    for head in range(num_heads):
        keys, values = key[head // per_group].double(), value[head // per_group].double()
        scores = query[:, head].double() @ keys.T / head_dim**0.5
        scores = scores.masked_fill(~mask, float("-inf"))
        heads.append(torch.softmax(scores, dim=-1) @ values)
    return torch.cat(heads, dim=-1)
