"""d3LLM (arXiv:2601.07568): several blocks at once, the next one opened by the last one's progress.

Next: drafters/denoise/presets.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid.decode.canvas import Block, Canvas
from hybrid.decode.slots import Slots
from hybrid.drafters.denoise.rules import Unmask, best, members


class MultiBlock:
    """A growing window of blocks, counted from the end of the prompt.

    Only the first unfinished block is sure of a slot per pass. The reference activates a block
    when its predecessor's progress reaches a threshold, and gives that slot to the first unfinished
    block that is active; as its predecessors are finished it always is, whatever the threshold.
    """

    def __init__(
        self,
        num_prompt: int,
        max_new_tokens: int,
        block_size: int,
        add_threshold: float,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        """Lay out the canvas: the last block may be shorter.

        Args:
            num_prompt: P.
            max_new_tokens: G.
            block_size: positions of a block.
            add_threshold: share of the last block that is known when the next one opens, at most
                one per pass.
            eos_token_ids: an answer that holds one of these ends there: what is behind it is filled
                with the first of them and never predicted. None lets the answer go on.
        """
        self.length, self._num_prompt = num_prompt + max_new_tokens, num_prompt
        self._block_size, self._add_threshold = block_size, min(add_threshold, 1.0)
        self._eos = torch.tensor(eos_token_ids, dtype=torch.long)
        self._last = num_prompt  # start of the last open block

    def open(self, canvas: Canvas) -> Sequence[Block]:
        """See `BlockSchedule`."""
        self._end_at_eos(canvas)
        end = self._end(self._last)
        if end < self.length:
            progress = 1 - canvas.num_masked(self._last, end) / (end - self._last)
            self._last = end if progress >= self._add_threshold else self._last
        starts = range(self._num_prompt, self._last + 1, self._block_size)
        unfinished = [s for s in starts if canvas.num_masked(s, self._end(s))]
        return [Block(s, self._end(s), quota=int(s == unfinished[0])) for s in unfinished]

    def stable_end(self, canvas: Canvas) -> int:
        """See `BlockSchedule`."""
        self._end_at_eos(canvas)  # before a reader sees what is behind it
        return canvas.first_masked

    def _end(self, start: int) -> int:
        return min(start + self._block_size, self.length)

    def _end_at_eos(self, canvas: Canvas) -> None:
        is_end = torch.isin(canvas.tokens, self._eos) & ~canvas.masked
        ends = is_end[self._num_prompt :].nonzero()[:, 0]
        if len(ends):
            behind = torch.arange(self._num_prompt + int(ends[0]) + 1, self.length)
            canvas.commit(behind, self._eos[:1].expand(len(behind)))


class SurestAlways:
    """What another rule chooses, and the surest slot of the pass in any case (d3LLM on LLaDA)."""

    def __init__(self, rule: Unmask) -> None:
        """Keep the rule."""
        self._rule = rule

    def choose(self, slots: Slots, blocks: Sequence[Block]) -> Tensor:
        """See `UnmaskRule`."""
        index = torch.cat([members(slots, block) for block in blocks])
        surest = index[best(self._rule.score(slots)[index], 1)]
        return torch.unique(torch.cat([self._rule.choose(slots, blocks), surest]))
