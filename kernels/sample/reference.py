"""Truncation by a full sort, and the draw, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def sample_reference(
    logits: Tensor,
    uniforms: Tensor,
    temperatures: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    farthest: Tensor,
) -> Tensor:
    """Draw a token of each row; see `sample`.

    Args:
        logits: [N, V].
        uniforms: [N] float64.
        temperatures: [N] float32.
        top_k: [N] integers.
        top_p: [N] float64.
        farthest: [N] float32, -log(min_p).
    """
    tempered, kept = _truncated(logits, temperatures, top_k, top_p, farthest)
    return draw(tempered.double().exp() * kept, uniforms)


def truncate_reference(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, farthest: Tensor
) -> Tensor:
    """Return the logits of each row's law; see `truncate`, and above for the arguments."""
    tempered, kept = _truncated(logits, temperatures, top_k, top_p, farthest)
    has_law = tempered.amax(dim=1, keepdim=True) == 0  # not NaN
    return torch.where(has_law, tempered.masked_fill(~kept, -torch.inf), torch.nan)


def _truncated(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, farthest: Tensor
) -> tuple[Tensor, Tensor]:
    """Return tempered logits [N, V] float32, the best at 0, and which of them stay."""
    logits = logits.float()
    top_k = torch.where(temperatures == 0, 1, torch.where(top_k > 0, top_k, logits.shape[1]))
    temperatures = torch.where(temperatures == 0, 1.0, temperatures)
    temperatures = temperatures.clamp_min(torch.finfo(torch.float32).tiny)
    tempered = (logits - logits.amax(dim=1, keepdim=True)) / temperatures[:, None]
    # Stable: among equals the lower id comes first.
    ranked, order = tempered.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)
    weights = ranked.double().exp() * (rank < top_k[:, None])
    reached = weights.cumsum(dim=1)
    before = reached - weights
    needed = top_p[:, None] * reached[:, -1:]
    kept = (before < needed) | (top_p[:, None] >= 1) | (rank == 0)
    kept &= (rank < top_k[:, None]) & (ranked >= -farthest[:, None])
    return tempered, torch.empty_like(kept).scatter(1, order, kept)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the token at quantile `uniforms` [N] of `weights` [N, V]; -1 where those are no law.

    Never a token of weight 0. Both are float64.
    """
    cdf = weights.cumsum(dim=1)
    total = cdf[:, -1:]
    tokens = torch.searchsorted(cdf, uniforms[:, None] * total, right=True)
    return torch.where((total > 0) & (total < torch.inf), tokens, -1)[:, 0]
