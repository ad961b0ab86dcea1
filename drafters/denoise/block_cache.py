"""Exact cache policies: finished blocks are cached once and for all.

Next: drafters/denoise/block_presets.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hybrid.decode.canvas import Block, Canvas, Pass, PassKind, rows_of
from hybrid.drafters.denoise.block_grid import Grid
from hybrid.types import Write

_NONE = torch.empty(0, dtype=torch.long)


class BlockCache:
    """A token sees its own block and those before it: keys and values of finished blocks stay.

    A block that is finished but not cached is fed together with the open ones and kept, so neither
    it nor the prompt costs a pass of its own, unless the prompt is longer than a chunk. With
    shifted logits the last clean token is fed again as long as the slot behind it is masked, which
    computes the same keys and values once more.
    """

    def __init__(
        self,
        grid: Grid,
        logit_shift: int,
        *,
        chunk: int | None = None,
        rewrites: bool = False,
    ) -> None:
        """Begin with nothing cached.

        Args:
            grid: the blocks.
            logit_shift: see `Backbone`.
            chunk: the most finished positions that the open blocks share a pass with; more are
                fed before, in whole blocks. None is no limit.
            rewrites: predict the tokens that the open block holds already, too.
        """
        self.grid, self._shift, self._chunk, self._rewrites = grid, logit_shift, chunk, rewrites
        self._cached = 0

    def plan(self, canvas: Canvas, blocks: Sequence[Block]) -> Pass:
        """See `CachePolicy`."""
        targets = torch.cat([self._targets(canvas, block) for block in blocks])
        needed = targets - self._shift  # the tokens whose logits predict them
        clean = self.grid.start(blocks[0].start)
        start, end = min(self._cached, int(needed[0])), self.grid.end(int(needed[-1]))
        kind = PassKind.DENOISE
        border = self.grid.start(start + (self._chunk or clean))
        if start < border < clean:  # a long prompt: only its next blocks now
            targets, needed, end, kind = _NONE, _NONE, border, PassKind.PREFILL
        self._cached = min(clean, end)
        positions = torch.arange(start, end)
        ids = self.grid.ids(positions)
        return Pass(
            positions,
            targets,
            needed - start,
            prefix=start,
            num_kept=self._cached - start,
            local=None if ids[0] == ids[-1] else ids[:, None] >= ids,
            rewrites=self._rewrites,
            kind=kind,
        )

    def _targets(self, canvas: Canvas, block: Block) -> Tensor:
        if self._rewrites:
            return torch.arange(max(block.start, canvas.num_prompt), block.end)
        return canvas.slots(block.start, block.end)


class SubBlockCache(BlockCache):
    """Within a block, feeds the sub-block alone, over keys and values of the last whole pass.

    Fast-dLLM v2 (arXiv:2509.26328) calls it block cache: what is kept of finished blocks is exact,
    the rest of the open block is as old as the pass that was fed all of it. That is the first one,
    and each one that the first slot of a sub-block needs: its predecessor lies in another.
    """

    _opened: int | None = None  # end of the block whose keys and values are in the cache

    def plan(self, canvas: Canvas, blocks: Sequence[Block]) -> Pass:
        """See `CachePolicy`."""
        (block,) = blocks
        end = self.grid.end(block.start)
        if self._opened == end and not canvas.masked[block.start]:
            targets = canvas.slots(block.start, block.end)
            return Pass(
                torch.arange(block.start, block.end),
                targets,
                rows_of(targets, block.start, self._shift),
                prefix=end,
                write=Write.REFRESH,
            )
        whole = super().plan(canvas, blocks)
        if whole.prefix + len(whole.positions) < end:  # it ends before the open block
            return whole
        self._opened = end
        return replace(whole, num_kept=len(whole.positions))


class CausalCache:
    """Keys and values of a causal pass over each finished block; slots are filled bidirectionally.

    Nemotron-Labs-Diffusion (arXiv:2607.05722): the causal pass also predicts the first slot of the
    next block, as AR decoding does. The prompt is prefilled in chunks.
    """

    def __init__(self, chunk: int) -> None:
        """Begin with nothing cached; `chunk` is the most tokens per prefill pass."""
        self._chunk, self._cached = chunk, 0

    def plan(self, canvas: Canvas, blocks: Sequence[Block]) -> Pass:
        """See `CachePolicy`."""
        (block,) = blocks
        start, end = self._cached, min(block.start, self._cached + self._chunk)
        if start == end:
            positions = torch.arange(block.start, block.end)
            targets = canvas.slots(block.start, block.end)
            return Pass(positions, targets, targets - block.start, prefix=start)
        self._cached = end
        is_last = end == block.start
        return Pass(
            torch.arange(start, end),
            torch.tensor([end]) if is_last else _NONE,
            torch.tensor([end - start - 1]) if is_last else _NONE,
            prefix=start,
            num_kept=end - start,
            is_causal=True,
            kind=PassKind.PREFILL if start < canvas.num_prompt else PassKind.COMMIT,
        )
