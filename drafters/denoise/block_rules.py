"""Unmask rules that also rewrite committed tokens. Next: drafters/denoise/block_schedules.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid.decode.canvas import Block
from hybrid.decode.slots import Slots
from hybrid.drafters.denoise.rules import Unmask


class Rewrite:
    """Fills masks like `Unmask`, and replaces a token by one that is sure enough (LLaDA2.1)."""

    def __init__(self, threshold: float, edit_threshold: float) -> None:
        """Keep the confidences that must be exceeded to fill a mask and to replace a token."""
        self._fill, self._edit_threshold = (
            Unmask(threshold=threshold, is_strict=True),
            edit_threshold,
        )

    def choose(self, slots: Slots, blocks: Sequence[Block]) -> Tensor:
        """See `UnmaskRule`."""
        assert slots.masked is not None  # passes that rewrite tell
        assert slots.current is not None
        edits = ~slots.masked & (slots.tokens != slots.current)
        edits &= slots.confidence > self._edit_threshold
        return torch.cat([self._fill.choose(slots, blocks), edits.nonzero()[:, 0]])
