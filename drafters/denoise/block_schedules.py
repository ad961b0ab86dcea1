"""Block schedules of models with a causal context: whole blocks on a grid, none ever reopened.

The canvas ends where a block ends, so `max_new_tokens` only cuts the answer.
Next: drafters/denoise/block_cache.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybrid.decode.canvas import Block, Canvas
from hybrid.drafters.denoise.block_grid import Grid
from hybrid.drafters.denoise.schedules import quotas


class _WholeBlocks:
    def __init__(self, grid: Grid, num_prompt: int, max_new_tokens: int) -> None:
        self.grid, self.end = grid, num_prompt + max_new_tokens
        self.length = grid.end(self.end - 1)

    def stable_end(self, canvas: Canvas) -> int:
        """See `BlockSchedule`."""
        return canvas.first_masked


class SteppedBlocks(_WholeBlocks):
    """One block after the other, each in a number of steps (SDAR, LLaDA2).

    The quota of a step is its even share of a whole block, in a block that the prompt shares too.
    """

    def __init__(self, grid: Grid, num_prompt: int, max_new_tokens: int, steps: int) -> None:
        """Lay out the canvas.

        Args:
            grid: the blocks.
            num_prompt: P.
            max_new_tokens: G.
            steps: passes that a block takes at most.
        """
        super().__init__(grid, num_prompt, max_new_tokens)
        self._quotas = quotas(grid.size, steps)
        self._start, self._num_masked, self._step = -1, 0, 0

    def open(self, canvas: Canvas) -> Sequence[Block]:
        """See `BlockSchedule`."""
        first = canvas.first_masked
        if first >= self.end:
            return ()
        start, end = self.grid.start(first), self.grid.end(first)
        num_masked = canvas.num_masked(start, end)
        if start != self._start:
            self._start, self._step = start, 0
        elif num_masked < self._num_masked:  # else the pass was a chunk of the prompt: no step
            self._step += 1
        self._num_masked = num_masked
        return (Block(start, end, self._quotas[self._step]),)


class RewrittenBlocks(_WholeBlocks):
    """One block after the other; its tokens may be replaced until it is finished (LLaDA2.1).

    A block is finished by the first pass that begins without masks and changes nothing, or after
    `max_post_steps` passes that began without masks. Its tokens are handed out then.
    """

    def __init__(
        self,
        grid: Grid,
        num_prompt: int,
        max_new_tokens: int,
        num_to_transfer: int,
        max_post_steps: int,
    ) -> None:
        """Lay out the canvas; `num_to_transfer` is the quota of each pass."""
        super().__init__(grid, num_prompt, max_new_tokens)
        self._quota, self._max_post_steps = num_to_transfer, max_post_steps
        self._start = self._end = grid.start(num_prompt)
        self._num_post = max_post_steps  # no block is open yet: the one before the first is done
        self._before: list[int] | None = None  # the block's tokens, once no mask is left

    def open(self, canvas: Canvas) -> Sequence[Block]:
        """See `BlockSchedule`."""
        if self._is_finished(canvas):
            if self._end >= self.end:
                return ()
            self._start, self._end = self._end, self.grid.end(self._end)
            self._num_post, self._before = 0, None
        if not canvas.num_masked(self._start, self._end):
            self._num_post += 1
            self._before = self._tokens(canvas)
        return (Block(self._start, self._end, self._quota),)

    def stable_end(self, canvas: Canvas) -> int:
        """See `BlockSchedule`."""
        return self._end if self._is_finished(canvas) else self._start

    def _is_finished(self, canvas: Canvas) -> bool:
        if canvas.num_masked(self._start, self._end):
            return False
        return self._num_post >= self._max_post_steps or self._before == self._tokens(canvas)

    def _tokens(self, canvas: Canvas) -> list[int]:
        tokens: list[int] = canvas.tokens[self._start : self._end].tolist()
        return tokens


class BlockWindow(_WholeBlocks):
    """Several blocks at once: one joins as soon as the last has got far enough (D2F).

    At most one joins per pass. A block must make progress, its best slot at least, once the one
    before it has got far enough; until then it takes only what its rule is sure of.
    """

    def __init__(
        self, grid: Grid, num_prompt: int, max_new_tokens: int, add: float, activate: float
    ) -> None:
        """Lay out the canvas.

        Args:
            grid: the blocks.
            num_prompt: P.
            max_new_tokens: G.
            add: share of committed slots in the last block from which on another joins.
            activate: share in the block before, from which on a block must make progress.
        """
        super().__init__(grid, num_prompt, max_new_tokens)
        self._add, self._activate = add, activate
        self._joined = num_prompt  # end of the last block that has joined

    def open(self, canvas: Canvas) -> Sequence[Block]:
        """See `BlockSchedule`."""
        if self._joined < self.length and self._progress(canvas, self._joined - 1) >= self._add:
            self._joined += self.grid.size
        blocks = []
        for start in range(self.grid.start(canvas.first_masked), self._joined, self.grid.size):
            end = start + self.grid.size
            if canvas.num_masked(start, end):
                is_active = self._progress(canvas, start - 1) >= self._activate
                blocks.append(Block(start, end, int(is_active)))
        return blocks

    def _progress(self, canvas: Canvas, position: int) -> float:
        start, end = self.grid.start(position), self.grid.end(position)
        return (end - start - canvas.num_masked(start, end)) / (end - start)


class BridgedBlocks(_WholeBlocks):
    """The first slot of each block by itself, then its sub-blocks from left to right.

    A pass over the finished block before predicts the first slot, as AR decoding does (Fast-dLLM
    v2, Nemotron-Labs-Diffusion).
    """

    def __init__(
        self, grid: Grid, num_prompt: int, max_new_tokens: int, sub_block_size: int
    ) -> None:
        """Lay out the canvas; `sub_block_size` divides the size of a block."""
        super().__init__(grid, num_prompt, max_new_tokens)
        self._sub_block_size = sub_block_size

    def open(self, canvas: Canvas) -> Sequence[Block]:
        """See `BlockSchedule`."""
        first = canvas.first_masked
        if first >= self.end:
            return ()
        if first == self.grid.start(first):
            return (Block(first, first + 1),)
        start = first - (first - self.grid.origin) % self._sub_block_size
        return (Block(start, start + self._sub_block_size),)
