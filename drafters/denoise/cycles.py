"""SlowFast sampling (arXiv:2506.10848): cycles of looking how far to go, then going there.

Next: drafters/denoise/presets.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import pstdev

from torch import Tensor

from hybrid.decode.canvas import Block, Canvas, Pass
from hybrid.decode.policies import CachePolicy
from hybrid.decode.slots import Slots
from hybrid.drafters.denoise.rules import Unmask


class Cycles:
    """Schedule, rule and cache policy of one row.

    A block is decoded in cycles, each behind the one before it. A slow phase of `num_slow` passes
    works on the whole rest of the block, and each of its passes estimates the end of the cycle: the
    farthest slot that is somewhat sure. The estimate stands once the last few agree; if they never
    do it is their mean. A fast phase then fills the cycle; from its second pass on it is fed
    nothing behind it. Either phase commits all slots that are very sure, at least the surest one.
    """

    def __init__(
        self,
        cache: CachePolicy,
        num_prompt: int,
        max_new_tokens: int,
        block_size: int,
        *,
        num_slow: int,
        sure: float,
        very_sure: float,
        window: int,
        max_deviation: float,
    ) -> None:
        """Lay out the canvas: the last block may be shorter.

        Args:
            cache: plans passes over the whole canvas.
            num_prompt: P.
            max_new_tokens: G.
            block_size: positions of a block.
            num_slow: passes of a slow phase.
            sure: confidence from which on a slot counts for the estimate.
            very_sure: confidence from which on a slot is committed.
            window: so many estimates in a row must agree,
            max_deviation: which they do if their standard deviation is less than this.
        """
        self.length = num_prompt + max_new_tokens
        self._cache, self._block_size, self._num_slow = cache, block_size, num_slow
        self._rule = Unmask(threshold=very_sure)
        self._sure, self._max_deviation = sure, max_deviation
        self._estimates: deque[int] = deque(maxlen=window)
        self._block_end = num_prompt
        self._is_slow, self._num_passes = True, 0
        self._begin(num_prompt)

    def open(self, canvas: Canvas) -> Sequence[Block]:
        """See `BlockSchedule`."""
        if canvas.num_masked(self._start, self._block_end) == 0:
            if self._block_end == self.length:
                return ()
            start = self._block_end
            self._block_end = min(start + self._block_size, self.length)
            self._begin(start)
        elif self._is_slow and self._num_passes == self._num_slow:
            self._is_slow, self._num_passes = False, 0
            self._end = self._cycle_end()
        if canvas.num_masked(self._start, self._end) == 0:
            self._begin(self._end)
        self._num_passes += 1
        return (Block(self._start, self._end),)

    def stable_end(self, canvas: Canvas) -> int:
        """See `BlockSchedule`."""
        return canvas.first_masked

    def plan(self, canvas: Canvas, blocks: Sequence[Block]) -> Pass:
        """See `CachePolicy`."""
        plan = self._cache.plan(canvas, blocks)
        if self._is_slow or self._num_passes == 1:
            return plan
        return replace(plan, positions=plan.positions[: self._end])

    def choose(self, slots: Slots, blocks: Sequence[Block]) -> Tensor:
        """See `UnmaskRule`."""
        if self._is_slow and not self._agree():
            sure = slots.positions[slots.confidence >= self._sure]
            self._estimates.append((int(sure[-1]) if len(sure) else self._start) + 1)
        return self._rule.choose(slots, blocks)

    def _begin(self, start: int) -> None:
        """Begin a cycle."""
        self._start, self._end = start, self._block_end
        self._is_slow, self._num_passes = True, 0
        self._estimates.clear()

    def _agree(self) -> bool:
        is_full = len(self._estimates) == self._estimates.maxlen
        return is_full and pstdev(self._estimates) < self._max_deviation

    def _cycle_end(self) -> int:
        return (
            self._estimates[-1] if self._agree() else sum(self._estimates) // len(self._estimates)
        )
