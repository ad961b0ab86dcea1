"""Greedy verification: a drafted token stays while it is the target's argmax.

Its own code path on argmax, not a low temperature. Next: verifiers/rejection.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hybrid.errors import ConfigError
from hybrid.sampling import argmax
from hybrid.transfer import DeviceVerdict, decides_on_device
from hybrid.types import Verdict
from hybrid.verifiers.on_device import greedy_on_device

if TYPE_CHECKING:
    from torch import Tensor

    from hybrid.params import SamplingParams
    from hybrid.streams import RandomStream
    from hybrid.types import Proposal


def greedy_outcomes(target_logits: Tensor, proposal: Proposal) -> list[tuple[int, int]]:
    """Return (num_accepted, next_token) of every row under the argmax, ties to the lowest id.

    Args:
        target_logits: [B, K+1, V].
        proposal: [B, K] tokens.
    """
    choices = argmax(target_logits)  # [B, K+1]
    both = torch.cat([choices, proposal.tokens.to(choices.device)], dim=1).tolist()
    width = choices.shape[1]
    outcomes = []
    for row, num_tokens in zip(both, proposal.num_tokens, strict=True):
        choice, drafted = row[:width], row[width:]
        num_accepted = 0
        while num_accepted < num_tokens and choice[num_accepted] == drafted[num_accepted]:
            num_accepted += 1
        outcomes.append((num_accepted, choice[num_accepted]))
    return outcomes


class GreedyVerifier:
    """Accepts the drafted tokens that greedy AR decoding would have produced."""

    name = "greedy"
    lossless = True

    def verify(
        self,
        target_logits: Tensor,
        proposal: Proposal,
        sampling: Sequence[SamplingParams],
        streams: Sequence[RandomStream],
    ) -> Verdict | DeviceVerdict:
        """Judge each row by the argmax; no random draw.

        Raises:
            ConfigError: a row has a temperature above 0.
        """
        for params in sampling:
            if not params.is_greedy:
                raise ConfigError(
                    f"Verifier 'greedy': got temperature {params.temperature}, expected 0. "
                    "Use the verifier 'rejection' or 'block' to sample."
                )
        if decides_on_device(target_logits.device):
            return greedy_on_device(target_logits, proposal)
        outcomes = greedy_outcomes(target_logits, proposal)
        return Verdict(tuple(n for n, _ in outcomes), tuple(t for _, t in outcomes))
