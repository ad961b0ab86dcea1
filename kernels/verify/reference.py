"""Both rules for a whole batch in plain PyTorch, float64 as in `hybrid.verifiers`."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hybrid.kernels.sample.reference import draw

Rule = Literal["rejection", "block"]


class Verified(NamedTuple):
    """A verdict per row.

    Attributes:
        num_accepted: [B] int64, leading drafted tokens that stay; -1: the draft excludes its token.
        next_token: [B] int64; -1: there is no law to draw it from.
    """

    num_accepted: Tensor
    next_token: Tensor


def verify_reference(
    target_logits: Tensor,
    tokens: Tensor,
    num_tokens: Tensor,
    uniforms: Tensor,
    draft_logits: Tensor | None,
    rule: Rule,
) -> Verified:
    """Judge every row; see `verify`."""
    batch, width, vocab_size = target_logits.shape
    target = target_logits.double().softmax(dim=-1)
    if draft_logits is None:
        draft = torch.nn.functional.one_hot(tokens, vocab_size).double()
    else:
        draft = draft_logits.double().softmax(dim=-1)
    slot = torch.arange(width - 1, device=tokens.device)
    drafted = slot < num_tokens[:, None]  # [B, K]
    of_token = draft.gather(2, tokens[..., None])[..., 0]
    impossible = (drafted & ~(of_token > 0)).any(dim=1)
    ratio = target[:, :-1].gather(2, tokens[..., None])[..., 0] / of_token

    # How likely the first i tokens may be kept, given that they were drafted; 1 for each rule's
    # empty prefix, and for every prefix that the token rule has accepted.
    keep = torch.ones(batch, width, dtype=torch.float64, device=tokens.device)
    if rule == "block":
        for i in range(width - 1):
            keep[:, i + 1] = (keep[:, i] * ratio[:, i]).clamp_max(1)
    owed = (keep[:, :-1, None] * target[:, :-1] - draft).clamp_min(0)  # [B, K, V]

    if rule == "rejection":
        passed = (uniforms[:, :-1] < ratio) & drafted
        num_accepted = passed.long().cumprod(dim=1).sum(dim=1)
    else:
        mass = owed.sum(dim=-1)
        odds = torch.where(mass > 0, mass / (mass + 1 - keep[:, :-1]), 0.0)
        odds = torch.cat([odds, keep[:, -1:]], dim=1)
        is_last = torch.arange(width, device=tokens.device) == num_tokens[:, None]
        odds = torch.where(is_last, keep, odds)
        passed = (uniforms[:, :-1] < odds[:, 1:]) & drafted
        num_accepted = (passed * (slot + 1)).amax(dim=1) if width > 1 else num_tokens.long()

    row = torch.arange(batch, device=tokens.device)
    law = target[row, num_accepted]
    residual = torch.cat([owed, target[:, -1:]], dim=1)[row, num_accepted]
    # All accepted: the target's own law. Equal up to rounding, nothing owed: likewise.
    whole = (num_accepted == num_tokens) | ~residual.any(dim=1)
    next_token = draw(torch.where(whole[:, None], law, residual), uniforms[row, num_tokens.long()])
    return Verified(
        num_accepted.masked_fill(impossible, -1), next_token.masked_fill(impossible, -1)
    )
