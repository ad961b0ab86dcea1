"""A text whose tokens all see each other, for slow twins of systems with such a context."""

from __future__ import annotations

import torch
from block_twins import MASK, Text
from torch import Tensor

from hybrid.attention.pattern import full_sequence


def laws(logits: Tensor, shift: int) -> Tensor:
    """Return the law of each slot [T, V] from a pass over consecutive tokens, without the mask."""
    logits = logits.clone()
    logits[:, MASK] = float("-inf")
    if shift:
        logits = torch.cat([logits[:1], logits[:-1]])
    return logits.softmax(dim=-1)


class Whole(Text):
    """A prompt and masked slots behind it; every call computes everything."""

    def laws(self, end: int | None = None) -> Tensor:
        """Return the law of each slot [T, V], if nothing behind `end` existed."""
        end = len(self.tokens) if end is None else end
        out = self.backbone.forward(
            torch.tensor([self.tokens[:end]]),
            torch.arange(end)[None],
            full_sequence(1, end),
            self.backbone.new_cache(1, end),
            [0],
        )
        return laws(out.logits[0], self.backbone.logit_shift)
