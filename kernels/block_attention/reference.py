"""Block attention on PyTorch's scaled_dot_product_attention, and its obvious float64 twin."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# `token_attention` takes multiples of so many keys and query rows per kv head: vectors stay whole,
# and so does the alignment of the scratch that torch's kernel gives to each of its threads. Without
# it the matrix library sums in another order on one thread than on the next.
KEY_TILE, ROW_TILE = 16, 8


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

    Every token is a product of the shapes that it would have alone: its own whole tiles of keys,
    those beyond it masked, and whole tiles of query rows. Tokens of the same shapes are a batch
    over the same keys, which saves calls.

    Args:
        query: [T, H, D]; query head h reads kv head h // (H / G).
        key: [G, S, D], S up to a multiple of `KEY_TILE`; finite beyond a token, too.
        value: [G, S, D].
        mask: [T, 1, 1, S] additive, in the dtype of query.
        first_length: keys up to and including the first token's own; each token has one more.

    Returns:
        [T, H * D].
    """
    num_tokens, num_heads, head_dim = query.shape
    grouped = query.reshape(num_tokens, key.shape[0], -1, head_dim)
    num_rows = grouped.shape[2]
    grouped = F.pad(grouped, (0, 0, 0, -num_rows % ROW_TILE))
    mask = mask.expand(-1, 1, grouped.shape[2], -1)
    outs = []
    start = 0
    while start < num_tokens:
        width = -(-(first_length + start) // KEY_TILE) * KEY_TILE
        end = min(num_tokens, width - first_length + 1)
        own, own_mask = grouped[start:end], mask[start:end, ..., :width]
        if len(own) * key.shape[0] == 1:  # one product alone would be shared among the threads
            own, own_mask = (t.expand(2, -1, -1, -1) for t in (own, own_mask))
        keys, values = (t[:, :width].expand(len(own), -1, -1, -1) for t in (key, value))
        out = F.scaled_dot_product_attention(own, keys, values, attn_mask=own_mask)
        outs.append(out[: end - start, :, :num_rows].reshape(end - start, num_heads * head_dim))
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
