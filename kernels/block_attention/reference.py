"""Block attention on PyTorch's scaled_dot_product_attention, and its obvious float64 twin."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

KEY_TILE = 16  # keys per vector of a CPU's sums; `token_attention` takes multiples


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


def token_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, first_length: int
) -> Tensor:
    """Attend for each token by itself: a token's bits do not depend on how many there are.

    Every token is a product of the shapes that it would have alone. Tokens of the same shapes are a
    batch over the same keys, which saves calls; to make that frequent, bfloat16 takes whole tiles
    of keys, those beyond a token masked. In float32 the CPU's library may share one token's product
    among its threads and not that of several, so each token has a call and keys of its own.

    Args:
        query: [T, H, D]; query head h reads kv head h // (H / G).
        key: [G, S, D], S up to a multiple of `KEY_TILE`.
        value: [G, S, D].
        mask: [T, 1, H / G, S] additive, in the dtype of query.
        first_length: keys up to and including the first token's own; each token has one more.

    Returns:
        [T, H * D].
    """
    num_tokens, num_heads, head_dim = query.shape
    grouped = query.reshape(num_tokens, key.shape[0], -1, head_dim)
    tile = KEY_TILE if query.dtype == torch.bfloat16 else 1
    outs = []
    start = 0
    while start < num_tokens:
        width = -(-(first_length + start) // tile) * tile
        end = min(num_tokens, width - first_length + 1)
        keys, values = (t[:, :width].expand(end - start, -1, -1, -1) for t in (key, value))
        out = F.scaled_dot_product_attention(
            grouped[start:end], keys, values, attn_mask=mask[start:end, ..., :width]
        )
        outs.append(out.reshape(end - start, num_heads * head_dim))
        start = end
    return outs[0] if len(outs) == 1 else torch.cat(outs)


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
