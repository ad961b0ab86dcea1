"""Rejection sampling, token by token, and the row loop that block verification shares.

Speculative sampling, Leviathan et al. 2023 (arXiv:2211.17192), Algorithm 1. An accept rule is a
pure function of probabilities and uniform numbers, so the tests can integrate over them exactly.
Next: verifiers/block.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from hybrid.errors import ProposalError
from hybrid.sampling import inverse_cdf
from hybrid.transfer import DeviceVerdict, decides_on_device
from hybrid.types import Verdict
from hybrid.verifiers.greedy import greedy_outcomes
from hybrid.verifiers.on_device import verify_on_device

if TYPE_CHECKING:
    from torch import Tensor

    from hybrid.kernels.verify.reference import Rule
    from hybrid.params import SamplingParams
    from hybrid.streams import RandomStream
    from hybrid.types import Proposal

AcceptRule = Callable[
    ["Tensor", "Tensor | None", Sequence[int], Sequence[float]], "tuple[int, Tensor]"
]
"""(target_probs [K+1, V], draft_probs [K, V] or None, K tokens, K uniforms) ->
(num_accepted, weights [V] of the next token); float64, the weights need not add up to 1."""


def accept_by_token(
    target_probs: Tensor,
    draft_probs: Tensor | None,
    tokens: Sequence[int],
    uniforms: Sequence[float],
) -> tuple[int, Tensor]:
    """Accept token i with probability min(1, target / draft), stop at the first rejection.

    Arguments and result are those of `AcceptRule`.

    Raises:
        ProposalError: draft_probs gives 0 to a token.
    """
    ratios = likelihood_ratios(target_probs, draft_probs, tokens)
    for i, (ratio, u) in enumerate(zip(ratios, uniforms, strict=True)):
        if not u < ratio:  # NaN rejects, and `inverse_cdf` reports it
            row = slice(i, i + 1)
            draft = None if draft_probs is None else draft_probs[row]
            return i, excess(target_probs[row], draft, tokens[row])[0]
    return len(tokens), target_probs[-1]


def likelihood_ratios(
    target_probs: Tensor, draft_probs: Tensor | None, tokens: Sequence[int]
) -> list[float]:
    """Return target / draft probability of each of the K tokens; may exceed 1.

    Raises:
        ProposalError: draft_probs gives 0 to a token.
    """
    index = torch.tensor(tokens, dtype=torch.long, device=target_probs.device).unsqueeze(1)
    target = target_probs[: len(tokens)].gather(1, index)
    if draft_probs is None:
        return target.squeeze(1).tolist()
    pairs = torch.cat([target, draft_probs.gather(1, index)], dim=1).tolist()
    for i, (_, draft) in enumerate(pairs):
        if not draft > 0:
            raise ProposalError(
                f"draft_probs: got probability {draft} for token {tokens[i]} at draft position "
                f"{i}, expected more than 0. A drafter must report the distribution that it drew "
                "from, or None for a token that it chose without drawing."
            )
    return [target / draft for target, draft in pairs]


def excess(weighted: Tensor, draft_probs: Tensor | None, tokens: Sequence[int]) -> Tensor:
    """Return max(0, weighted - draft), [N, V]: what the target still owes to each token.

    Args:
        weighted: [N, V] target probabilities, each row times a number in [0, 1].
        draft_probs: [N, V]; None is a point mass on each of the tokens.
        tokens: N drafted ids.
    """
    if draft_probs is not None:
        return (weighted - draft_probs).clamp_min(0)
    owed = weighted.clone()
    owed[range(len(tokens)), list(tokens)] = 0
    return owed


def verify_rows(
    rule: AcceptRule,
    target_logits: Tensor,
    proposal: Proposal,
    sampling: Sequence[SamplingParams],
    streams: Sequence[RandomStream],
    *,
    kernel: Rule | None = None,
) -> Verdict | DeviceVerdict:
    """Judge greedy rows by the argmax and the others by `rule`, each row by itself.

    A row with n drafted tokens draws n + 1 numbers from its stream whatever the outcome, a
    greedy row none. Where the device decides, the rule of this name in kernels/verify does it
    there; None is a rule for the host alone. Other arguments and errors are those of
    `Verifier.verify`.
    """
    if kernel is not None and decides_on_device(target_logits.device):
        return verify_on_device(kernel, target_logits, proposal, sampling, streams)
    greedy = any(params.is_greedy for params in sampling)
    outcomes = greedy_outcomes(target_logits, proposal) if greedy else [(0, 0)] * len(sampling)
    for b, (num_tokens, params) in enumerate(zip(proposal.num_tokens, sampling, strict=True)):
        if params.is_greedy:
            continue
        target_probs = torch.softmax(target_logits[b, : num_tokens + 1].double(), dim=-1)
        draft_probs = None
        if proposal.draft_probs is not None:
            draft_probs = proposal.draft_probs[b, :num_tokens].to(target_probs)
            # Float32 rows add up to 1 only nearly; the drafter drew from the normalised row.
            draft_probs = draft_probs / draft_probs.sum(dim=-1, keepdim=True)
        tokens = proposal.tokens[b, :num_tokens].tolist()
        *uniforms, last = [streams[b].uniform() for _ in range(num_tokens + 1)]
        num_accepted, weights = rule(target_probs, draft_probs, tokens, uniforms)
        if not weights.any():  # target and draft equal up to rounding
            weights = target_probs[num_accepted]
        outcomes[b] = (num_accepted, inverse_cdf(weights, last))
    return Verdict(tuple(n for n, _ in outcomes), tuple(t for _, t in outcomes))


class RejectionVerifier:
    """Accepts each drafted token by its own likelihood ratio; exact for any drafter."""

    name = "rejection"
    lossless = True

    def verify(
        self,
        target_logits: Tensor,
        proposal: Proposal,
        sampling: Sequence[SamplingParams],
        streams: Sequence[RandomStream],
    ) -> Verdict | DeviceVerdict:
        """Judge each row's proposal; see `Verifier.verify`.

        Raises:
            ProposalError: draft_probs gives 0 to a token it proposed.
        """
        return verify_rows(
            accept_by_token, target_logits, proposal, sampling, streams, kernel="rejection"
        )
