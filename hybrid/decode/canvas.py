"""`Canvas`: one answer while it is denoised, and the nouns of a denoising pass.

A canvas is the prompt and the slots of the answer. Whether a slot is masked is a bitmap, never the
id in it: a prompt may hold the mask id. Everything here is small and lives on the CPU.
Next: hybrid/decode/policies.py.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybrid.types import Write

if TYPE_CHECKING:
    from hybrid.models.feature_cache import FeatureCache


class Canvas:
    """Tokens of one row, committed and masked.

    Attributes:
        tokens: [S] ids; a masked slot holds the mask id.
        masked: [S] bool.
        confidence: [S] probability of a token when it was committed; 1 in the prompt.
        num_prompt: leading tokens that never change.
    """

    def __init__(self, prompt: Sequence[int], length: int, mask_token_id: int) -> None:
        """Put `length - len(prompt)` masked slots behind the prompt."""
        self.num_prompt = len(prompt)
        self.tokens = torch.full((length,), mask_token_id)
        self.tokens[: self.num_prompt] = torch.tensor(prompt)
        self.masked = torch.arange(length) >= self.num_prompt
        self.confidence = (~self.masked).float()

    def __len__(self) -> int:
        """Return S."""
        return len(self.tokens)

    @property
    def first_masked(self) -> int:
        """Position of the first masked slot, S when none is."""
        slots = self.masked.nonzero()
        return int(slots[0]) if len(slots) else len(self)

    def num_masked(self, start: int, end: int) -> int:
        """Return how many slots of [start, end) are masked."""
        return int(self.masked[start:end].sum())

    def slots(self, start: int, end: int) -> Tensor:
        """Return the positions of the masked slots of [start, end), ascending."""
        return self.masked[start:end].nonzero()[:, 0] + start

    def copy(self) -> Canvas:
        """Return a canvas of its own with the same slots."""
        twin = copy.copy(self)
        twin.tokens, twin.masked = self.tokens.clone(), self.masked.clone()
        twin.confidence = self.confidence.clone()
        return twin

    def equals(self, other: Canvas) -> bool:
        """Return whether both hold the same tokens in the same slots."""
        return torch.equal(self.tokens, other.tokens) and torch.equal(self.masked, other.masked)

    def commit(self, positions: Tensor, tokens: Tensor, confidence: Tensor | float = 1.0) -> None:
        """Write tokens [n] at positions [n], masked or not, of the answer."""
        self.tokens[positions] = tokens
        self.masked[positions] = False
        self.confidence[positions] = torch.as_tensor(confidence, dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class Block:
    """A block that is being worked on.

    Attributes:
        start: first position.
        end: behind the last.
        quota: at least so many of its masked slots are committed by the next pass.
    """

    start: int
    end: int
    quota: int = 1


class PassKind(str, Enum):
    """What a pass is for; statistics are split by it."""

    PREFILL = "prefill"
    DENOISE = "denoise"
    COMMIT = "commit"


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of the backbone over some tokens of a canvas.

    Attributes:
        positions: [T] what is fed, in this order.
        targets: [n] slots whose tokens it predicts.
        rows: [n] index in `positions` of the token whose logits predict each target.
        prefix: cached positions that every token sees; what the row holds beyond is forgotten.
        num_kept: leading tokens of the pass whose K/V join the row.
        local: [T, T] which token sees which, None for all.
        is_causal: `local` is the lower triangle.
        rewrites: not all of the targets are masked: a rule may replace tokens.
        write: SCRATCH, or REFRESH to overwrite the cached K/V of these positions.
        kind: for the statistics.
        features: what layers added to the row's tokens in earlier passes, to be reused.
        guesses: canvases that the row may reach by what this pass predicts, fed beside it. One that
            comes true saves the pass that it would have needed.
    """

    positions: Tensor
    targets: Tensor
    rows: Tensor
    prefix: int = 0
    num_kept: int = 0
    local: Tensor | None = None
    is_causal: bool = False
    rewrites: bool = False
    write: Write = Write.SCRATCH
    kind: PassKind = PassKind.DENOISE
    features: FeatureCache | None = None
    guesses: tuple[Guess, ...] = ()


@dataclass(frozen=True, slots=True)
class Guess:
    """A canvas that a row may reach, and the pass over it."""

    canvas: Canvas
    plan: Pass


def rows_of(targets: Tensor, first: int, logit_shift: int) -> Tensor:
    """Return which token of a pass over `first`, `first + 1`, ... predicts each target.

    With a shift that is its predecessor; the first token of a pass, whose predecessor is not in
    it, falls back on its own row, as the references do.
    """
    return (targets - first - logit_shift).clamp(min=0)
