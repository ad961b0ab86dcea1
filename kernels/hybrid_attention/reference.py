"""The same in plain PyTorch: each row's keys, a dense mask, a softmax in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid.kernels.hybrid_attention.visible import Visible


def hybrid_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Visible,
    window: int | None,
    softcap: float | None,
    scale: float,
) -> Tensor:
    """Attend in float32, in float64 if that is what query is; shapes as `hybrid_attention`."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    per_group = query.shape[2] // key.shape[1]
    rows = []
    for row in range(visible.batch):
        mask = visible.dense(row, window)  # [T, N]
        keys, values = (
            _of_row(t, visible, row, mask.shape[1]).to(dtype).repeat_interleave(per_group, dim=0)
            for t in (key, value)
        )  # [H, N, D]
        # What nobody sees may be anything, a NaN too, and a weight of 0 would not stop it.
        values = values.masked_fill(~mask.any(0)[:, None], 0)
        scores = query[row].transpose(0, 1).to(dtype) @ keys.transpose(1, 2) * scale  # [H, T, N]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1)
        weights = weights.masked_fill(~mask, 0)  # of a token that sees nothing, NaN
        rows.append((weights @ values).transpose(0, 1))
    return torch.stack(rows).to(query.dtype)


def _of_row(cache: Tensor, visible: Visible, row: int, length: int) -> Tensor:
    """Return the first `length` keys of a row, [G, length, D]."""
    if not visible.is_paged:
        return cache[int(visible.table[row]), :, :length]
    pages = cache[visible.table[row].long()]  # [P, G, page size, D]
    return pages.transpose(0, 1).flatten(1, 2)[:, :length]
