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
    logits = logits.float()
    best = logits.amax(dim=1, keepdim=True)
    top_k = torch.where(temperatures == 0, 1, torch.where(top_k > 0, top_k, logits.shape[1]))
    temperatures = torch.where(temperatures == 0, 1.0, temperatures)
    temperatures = temperatures.clamp_min(torch.finfo(torch.float32).tiny)
    # Stable: among equals the lower id comes first.
    ranked, order = ((logits - best) / temperatures[:, None]).sort(
        dim=1, descending=True, stable=True
    )
    rank = torch.arange(logits.shape[1], device=logits.device)
    weights = ranked.double().exp() * (rank < top_k[:, None])
    reached = weights.cumsum(dim=1)
    before = reached - weights
    needed = top_p[:, None] * reached[:, -1:]
    kept = (before < needed) | (top_p[:, None] >= 1) | (rank == 0)
    weights = weights * kept * (ranked >= -farthest[:, None])
    law = torch.zeros_like(weights).scatter(1, order, weights)
    return draw(law, uniforms)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the token at quantile `uniforms` [N] of `weights` [N, V]; -1 where those are no law.

    Never a token of weight 0. Both are float64.
    """
    cdf = weights.cumsum(dim=1)
    total = cdf[:, -1:]
    tokens = torch.searchsorted(cdf, uniforms[:, None] * total, right=True)
    return torch.where((total > 0) & (total < torch.inf), tokens, -1)[:, 0]
