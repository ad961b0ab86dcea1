"""WeDLM (arXiv:2512.22737): masks are filled in a sliding window under causal attention.

What is known is fed first and the masks behind it, each at its true position, so a mask sees all
that is known of its window and the cache stays that of causal decoding: exact.
Next: hybrid/decode/denoise.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from hybrid.decode.canvas import Block, Canvas, Pass
from hybrid.decode.policies import Count, DenoisePreset, Denoiser
from hybrid.decode.slots import Slots
from hybrid.drafters.denoise.rules import Unmask
from hybrid.protocols import Backbone
from hybrid.types import Context


class SlidingWindow:
    """One window that begins at the first masked slot."""

    def __init__(self, num_prompt: int, max_new_tokens: int, window_size: int) -> None:
        """Lay out the canvas.

        A window reaches beyond the answer at its end, as the reference's does: what is filled there
        is seen by the slots before it.
        """
        self._end, self._window_size = num_prompt + max_new_tokens, window_size
        self.length = self._end + window_size - 1

    def open(self, canvas: Canvas) -> Sequence[Block]:
        """See `BlockSchedule`."""
        start = canvas.first_masked
        return () if start >= self._end else (Block(start, start + self._window_size),)

    def stable_end(self, canvas: Canvas) -> int:
        """See `BlockSchedule`."""
        return canvas.first_masked


class KnownFirst:
    """Feeds what is known and not cached, then the masks; what precedes the masks stays cached."""

    def __init__(self) -> None:
        """Begin with an empty cache."""
        self._num_cached = 0

    def plan(self, canvas: Canvas, blocks: Sequence[Block]) -> Pass:
        """See `CachePolicy`."""
        (window,) = blocks
        start, fed = self._num_cached, torch.arange(self._num_cached, window.end)
        masked = canvas.masked[start : window.end]
        known, targets = fed[~masked], fed[masked]
        self._num_cached = window.start
        return Pass(
            torch.cat([known, targets]),
            targets,
            torch.arange(len(known), len(fed)),
            prefix=start,
            num_kept=window.start - start,
            is_causal=True,
        )


class WeDLM(DenoisePreset):
    """WeDLM (arXiv:2512.22737): slots whose entropy, raised by their distance, is low enough.

    Attributes:
        window_size: positions from the first masked slot on.
        entropy_threshold: slots that score less are committed; the best one always is. Nats.
        position_penalty: what a slot's score gains per position from the first masked one.
    """

    contexts: ClassVar[tuple[Context, ...]] = (Context.CAUSAL,)

    window_size: Count = 16
    entropy_threshold: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.4
    position_penalty: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.02

    def start(self, backbone: Backbone, num_prompt: int, max_new_tokens: int) -> Denoiser:
        """See `DenoisePreset`."""

        def score(slots: Slots) -> Tensor:
            distance = (slots.positions - slots.positions[0]).float()
            return -(slots.entropy + self.position_penalty * distance)

        return Denoiser(
            SlidingWindow(num_prompt, max_new_tokens, self.window_size),
            Unmask(score, -self.entropy_threshold, is_strict=True),
            KnownFirst(),
            raw_confidence=True,
        )
