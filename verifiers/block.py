"""Block verification: the whole proposal is judged at once.

Sun et al. 2024 (arXiv:2403.10444), Algorithm 2: the same output distribution as rejection
sampling, and no verifier accepts more drafted tokens in expectation. Next: hybrid/decode/step.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hybrid.verifiers.rejection import excess, likelihood_ratios, verify_rows

if TYPE_CHECKING:
    from torch import Tensor

    from hybrid.params import SamplingParams
    from hybrid.streams import RandomStream
    from hybrid.transfer import DeviceVerdict
    from hybrid.types import Proposal, Verdict


def accept_by_block(
    target_probs: Tensor,
    draft_probs: Tensor | None,
    tokens: Sequence[int],
    uniforms: Sequence[float],
) -> tuple[int, Tensor]:
    """Accept the longest prefix that passes its own test; an earlier failure does not end it.

    Arguments and result are those of `hybrid.verifiers.rejection.AcceptRule`.

    Raises:
        ProposalError: draft_probs gives 0 to a token.
    """
    num_tokens = len(tokens)
    # The paper's p_i: how likely the first i tokens may be kept, given that they were drafted.
    keep = [1.0]
    for ratio in likelihood_ratios(target_probs, draft_probs, tokens):
        keep.append(min(keep[-1] * ratio, 1.0))  # in this order NaN stays NaN
    scale = torch.tensor(keep[:-1], dtype=torch.float64, device=target_probs.device).unsqueeze(1)
    owed = excess(scale * target_probs[:-1], draft_probs, tokens)  # [K, V]
    # The paper's h_i: the chance to stop at i or later, were no longer prefix to pass.
    odds = [
        mass / (mass + 1 - kept) if mass > 0 else 0.0
        for mass, kept in zip(owed.sum(dim=-1).tolist(), keep, strict=False)
    ]
    odds.append(keep[-1])
    num_accepted = max(
        (i for i in range(1, num_tokens + 1) if uniforms[i - 1] < odds[i]), default=0
    )
    return num_accepted, target_probs[-1] if num_accepted == num_tokens else owed[num_accepted]


class BlockVerifier:
    """Accepts the longest prefix of a proposal that exactness allows in expectation."""

    name = "block"
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
            accept_by_block, target_logits, proposal, sampling, streams, kernel="block"
        )
