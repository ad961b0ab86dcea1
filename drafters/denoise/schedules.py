"""Block schedules in which one block follows the other. Next: drafters/denoise/caches.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid.decode.canvas import Block, Canvas
from hybrid.decode.slots import Slots


def quotas(num_masked: int, steps: int) -> list[int]:
    """Split `num_masked` slots over steps evenly, the first steps take the remainder."""
    share, rest = divmod(num_masked, steps)
    return [share + 1] * rest + [share] * (steps - rest)


class SemiAutoregressive:
    """Blocks counted from the end of the prompt, each finished before the next (LLaDA)."""

    def __init__(
        self, num_prompt: int, max_new_tokens: int, block_size: int, steps: int | None = None
    ) -> None:
        """Lay out the canvas: the last block may be shorter.

        Args:
            num_prompt: P.
            max_new_tokens: G.
            block_size: positions of a block.
            steps: passes for the whole answer, shared evenly by the blocks, at least one for each;
                None commits at least one slot per pass.
        """
        self.length = num_prompt + max_new_tokens
        self._block_size, self._steps = block_size, steps
        self._num_blocks = -(-max_new_tokens // block_size)
        self._end = num_prompt  # of the block being worked on
        self._start = num_prompt
        self._steps_left = 0  # of the block

    def open(self, canvas: Canvas) -> Sequence[Block]:
        """See `BlockSchedule`."""
        while canvas.num_masked(self._start, self._end) == 0:
            if self._end == self.length:
                return ()
            self._start = self._end
            self._end = min(self._start + self._block_size, self.length)
            if self._steps is not None:
                self._steps_left = max(1, self._steps // self._num_blocks)
        quota = 1
        if self._steps is not None:
            # An even share of what is left: as `quotas`, also if a pass has committed less.
            masked = canvas.num_masked(self._start, self._end)
            quota = -(-masked // max(1, self._steps_left))
            self._steps_left -= 1
        return (Block(self._start, self._end, quota),)

    def stable_end(self, canvas: Canvas) -> int:
        """See `BlockSchedule`."""
        return canvas.first_masked


class DreamSteps:
    """The whole answer at once, over a fixed number of steps (Dream, arXiv:2508.15487).

    At step i of time t = linspace(1, eps, steps + 1) the share 1 - t[i + 1] / t[i] of what is
    masked is committed, and all of it in the last. Steps that commit nothing run no pass.
    """

    def __init__(self, num_prompt: int, max_new_tokens: int, steps: int, eps: float) -> None:
        """Lay out the canvas."""
        self.length, self._start = num_prompt + max_new_tokens, num_prompt
        time = torch.linspace(1, eps, steps + 1)
        self._shares = 1 - time[1:] / time[:-1]
        self._shares[-1] = 1
        self._step = 0

    def open(self, canvas: Canvas) -> Sequence[Block]:
        """See `BlockSchedule`."""
        num_masked = canvas.num_masked(self._start, self.length)
        while num_masked and self._step < len(self._shares):
            quota = int(num_masked * self._shares[self._step])  # in float32, as the reference
            self._step += 1
            if quota:
                return (Block(self._start, self.length, quota),)
        return ()

    def stable_end(self, canvas: Canvas) -> int:
        """See `BlockSchedule`."""
        return canvas.first_masked


class IndependentSteps(DreamSteps):
    """Schedule and rule: each masked slot by itself, with the step's share as its odds.

    Dream's algorithm "origin".
    """

    def open(self, canvas: Canvas) -> Sequence[Block]:
        """See `BlockSchedule`."""
        if self._step == len(self._shares) or not canvas.num_masked(self._start, self.length):
            return ()
        self._step += 1
        return (Block(self._start, self.length, 0),)

    def choose(self, slots: Slots, blocks: Sequence[Block]) -> Tensor:
        """See `UnmaskRule`."""
        return (slots.random < self._shares[self._step - 1]).nonzero()[:, 0]
