"""How a drafter draws a token: by the very transforms that the target's logits will get.

Next: verifiers/rejection.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid.sampling import probs, process_logits, sample
from hybrid.types import SequenceState


def draw_token(
    logits: Tensor, row: SequenceState, drafted: Sequence[int], eos_token_ids: Sequence[int]
) -> tuple[int, Tensor]:
    """Return a token, and the law [V] that it was drawn from: a point mass for a greedy row.

    Args:
        logits: [V] of the draft, untouched.
        row: whose sampling parameters and generator count.
        drafted: tokens drawn before it in this step; penalties count them, as the target's will.
        eos_token_ids: kept back until the row has `min_new_tokens`.
    """
    processed = process_logits(
        logits[None],
        row.sampling,
        [*row.tokens, *drafted],
        row.num_prompt_tokens,
        (),
        eos_token_ids,
    )[0]
    if row.sampling.is_greedy:
        token = int(processed.argmax())
        return token, point_mass(token, processed)
    law = probs(processed)
    return sample(law, row.generator), law


def point_mass(token: int, like: Tensor) -> Tensor:
    """Return the law [V] float32 of a token that was not drawn, on the device of `like` [V]."""
    law = torch.zeros_like(like, dtype=torch.float32)
    law[token] = 1.0
    return law
