"""Verdicts where the logits are: nothing is read back, so the host need not wait for them.

The same rules as on the host, by the kernels and with the same random numbers. A verdict differs
from the host's only where float32 rounds a number across a threshold. Next: kernels/verify.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hybrid.kernels.verify import verify
from hybrid.sampling import argmax, uniforms
from hybrid.transfer import DeviceVerdict, send

if TYPE_CHECKING:
    from torch import Tensor

    from hybrid.kernels.verify.reference import Rule
    from hybrid.params import SamplingParams
    from hybrid.streams import RandomStream
    from hybrid.types import Proposal


def greedy_on_device(target_logits: Tensor, proposal: Proposal) -> DeviceVerdict:
    """Judge every row by the argmax, ties to the lowest id.

    Args:
        target_logits: [B, K+1, V].
        proposal: [B, K] tokens.
    """
    choices = argmax(target_logits)  # [B, K+1]
    tokens = proposal.tokens.to(choices.device, non_blocking=True)
    slots = torch.arange(tokens.shape[1], device=choices.device)
    is_drafted = slots < send(proposal.num_tokens, choices.device)[:, None]
    num_accepted = ((choices[:, :-1] == tokens) & is_drafted).long().cumprod(dim=1).sum(dim=1)
    return DeviceVerdict(num_accepted, choices.gather(1, num_accepted[:, None])[:, 0])


def verify_on_device(
    rule: Rule,
    target_logits: Tensor,
    proposal: Proposal,
    sampling: Sequence[SamplingParams],
    streams: Sequence[RandomStream],
) -> DeviceVerdict:
    """Judge greedy rows by the argmax and the others by the kernel's `rule`.

    Other arguments are those of `Verifier.verify`. The streams move as on the host: n + 1 numbers
    of a sampled row with n drafted tokens.
    """
    device = target_logits.device
    laws = proposal.draft_probs
    drawn = [
        0 if params.is_greedy else n + 1
        for params, n in zip(sampling, proposal.num_tokens, strict=True)
    ]
    verified = verify(
        target_logits,
        proposal.tokens.to(device, torch.long, non_blocking=True),
        send(proposal.num_tokens, device),
        uniforms(streams, drawn, target_logits.shape[1], device),
        draft_logits=None if laws is None else laws.to(device, non_blocking=True).log(),
        rule=rule,
    )
    if all(drawn):
        return DeviceVerdict(*verified)
    greedy = greedy_on_device(target_logits, proposal)
    is_greedy = send([not n for n in drawn], device, torch.bool)
    return DeviceVerdict(
        torch.where(is_greedy, greedy.num_accepted, verified.num_accepted),
        torch.where(is_greedy, greedy.next_token, verified.next_token),
    )
