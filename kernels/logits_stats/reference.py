"""Statistics of softmax laws in plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class LogitsStats(NamedTuple):
    """One number of each kind per row [N].

    Attributes:
        argmax: int64, the most probable token, ties to the lowest id.
        probability: float32, of that token.
        margin: float32, that less the probability of the next most probable one.
        entropy: float32, nats.
        logsumexp: float32, of logits / temperature.
    """

    argmax: Tensor
    probability: Tensor
    margin: Tensor
    entropy: Tensor
    logsumexp: Tensor


def logits_stats_reference(
    logits: Tensor, temperatures: Tensor, suppressed: int | None
) -> LogitsStats:
    """Return the statistics; see `logits_stats`. Float64 logits are computed in float64."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if suppressed is not None:
        logits = logits.index_fill(1, torch.tensor([suppressed], device=logits.device), -torch.inf)
    best, argmax = logits.max(dim=1)
    temperatures = temperatures.clamp_min(torch.finfo(torch.float32).tiny)
    # Shifted first: no temperature, however low, overflows.
    law = ((logits - best[:, None]) / temperatures[:, None]).log_softmax(dim=1)
    top = torch.nn.functional.pad(law.exp(), (0, 1)).topk(2, dim=1).values  # a V of 1 has a next: 0
    return LogitsStats(
        argmax=argmax,
        probability=top[:, 0],
        margin=top[:, 0] - top[:, 1],
        entropy=torch.special.entr(law.exp()).sum(dim=1),
        # The best token's own logarithm is that of the sum of all, relative to it.
        logsumexp=torch.where(best == -torch.inf, best, best / temperatures - law.amax(dim=1)),
    )
