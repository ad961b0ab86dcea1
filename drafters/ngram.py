"""Prompt lookup: what followed the last few tokens when they occurred before.

Stateless, so rows may come and go freely; the search runs at list speed, microseconds per thousand
tokens. Costs no forward, and pays where the answer repeats its context. Next: verifiers/greedy.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hybrid.errors import ConfigError
from hybrid.types import Proposal

if TYPE_CHECKING:
    from hybrid.protocols import DraftState
    from hybrid.types import Plan, StepRecord


class NgramDrafter:
    """Copies the tokens that followed the longest, then most recent, match of the row's suffix."""

    name = "ngram"
    taps: tuple[int, ...] = ()

    def __init__(self, max_draft_tokens: int = 7, max_ngram: int = 3, min_ngram: int = 1) -> None:
        """Set the limits.

        Args:
            max_draft_tokens: the most tokens to propose. With the anchor, 7 make 8 rows: whole
                tiles of a CPU's matrix kernels, where a ninth row costs as much as four.
            max_ngram: longest suffix to look for.
            min_ngram: shortest suffix that counts as a match.

        Raises:
            ConfigError: not 1 <= min_ngram <= max_ngram, or max_draft_tokens below 1.
        """
        if max_draft_tokens < 1:
            raise ConfigError(f"max_draft_tokens: got {max_draft_tokens}, expected at least 1.")
        if not 1 <= min_ngram <= max_ngram:
            raise ConfigError(
                f"min_ngram, max_ngram: got {min_ngram}, {max_ngram}, "
                "expected 1 <= min_ngram <= max_ngram."
            )
        self.max_draft_tokens = max_draft_tokens
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram

    def draft(self, state: DraftState, plan: Plan) -> Proposal:
        """Propose up to `plan.num_draft_tokens` tokens per row, none where nothing matches."""
        limit = min(plan.num_draft_tokens, self.max_draft_tokens)
        drafts = []
        for row in state.rows:
            start = find_continuation(row.tokens, self.max_ngram, self.min_ngram)
            drafts.append(row.tokens[start : start + limit])
        num_tokens = tuple(len(d) for d in drafts)
        width = max(num_tokens, default=0)
        padded = [d + [0] * (width - len(d)) for d in drafts]
        tokens = torch.tensor(padded, dtype=torch.long).reshape(len(drafts), width)
        return Proposal(tokens, num_tokens)

    def observe(self, record: StepRecord) -> None:
        """Nothing to learn."""

    def reset(self) -> None:
        """Nothing to forget."""


def find_continuation(tokens: Sequence[int], max_ngram: int, min_ngram: int) -> int:
    """Return the index after the best earlier match of the suffix; `len(tokens)` without one."""
    suffix = tokens[: -max_ngram - 1 : -1]  # newest first, like `earlier`
    earlier = tokens[-2::-1]
    best, best_length, position = -1, min_ngram - 1, -1
    while best_length < len(suffix):
        try:
            position = earlier.index(suffix[0], position + 1)
        except ValueError:
            break
        window = earlier[position : position + max_ngram]
        length = 0
        while length < len(window) and window[length] == suffix[length]:
            length += 1
        if length > best_length:
            best, best_length = position, length
    return len(tokens) - 1 - best if best_length >= min_ngram else len(tokens)
