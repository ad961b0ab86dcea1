"""How a drafter draws a token: by the very transforms that the target's logits will get.

Next: verifiers/rejection.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid.sampling import draw, probs, process_logits, uniforms
from hybrid.types import SequenceState


def take_numbers(
    rows: Sequence[SequenceState], counts: Sequence[int], device: torch.device
) -> Tensor:
    """Take a number for each of the first `counts[b]` tokens of each row; a greedy row needs none.

    Returns:
        [B, max(counts)] float64.
    """
    drawn = [0 if row.sampling.is_greedy else n for row, n in zip(rows, counts, strict=True)]
    return uniforms([row.stream for row in rows], drawn, max(counts), device)


def draw_tokens(
    logits: Tensor,
    rows: Sequence[SequenceState],
    drafted: Tensor,
    eos_token_ids: Sequence[int],
    numbers: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return a token of each row [B], and the laws [B, V] that they were drawn from.

    The law of a greedy row is a point.

    Args:
        logits: [B, V] of the draft, untouched.
        rows: whose sampling parameters count.
        drafted: [B, n] tokens drawn before in this step; penalties count them, as the target's do.
        eos_token_ids: kept back until a row has `min_new_tokens`.
        numbers: [B] of `take_numbers`.
    """
    processed = torch.cat(
        [
            process_logits(
                logits[b : b + 1],
                row.sampling,
                row.tokens,
                row.num_prompt_tokens,
                drafted[b],
                eos_token_ids,
                first=drafted.shape[1],
            )
            for b, row in enumerate(rows)
        ]
    )
    is_greedy = [row.sampling.is_greedy for row in rows]
    laws = probs(processed)
    tokens = draw(processed, laws, numbers, is_greedy)
    for b, greedy in enumerate(is_greedy):
        if greedy:
            laws[b] = point_mass(tokens[b], laws[b])
    return tokens, laws


def point_mass(tokens: Tensor, laws: Tensor) -> Tensor:
    """Return the laws [..., V] of tokens [...] that were not drawn, in the shape of others."""
    return torch.zeros_like(laws).scatter_(-1, tokens[..., None], 1.0)
