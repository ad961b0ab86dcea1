"""Cache policies of models whose tokens see all others: the cache is none, or an approximation.

Next: drafters/denoise/presets.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hybrid.decode.canvas import Block, Canvas, Pass, rows_of
from hybrid.decode.policies import UnmaskRule
from hybrid.decode.slots import Slots
from hybrid.models.feature_cache import FeatureCache
from hybrid.types import Write


class NoCache:
    """Every pass is fed the whole canvas."""

    def __init__(self, logit_shift: int) -> None:
        """Keep where a slot is predicted; see `Backbone.logit_shift`."""
        self._shift = logit_shift

    def plan(self, canvas: Canvas, blocks: Sequence[Block]) -> Pass:
        """See `CachePolicy`."""
        targets = torch.cat([canvas.slots(b.start, b.end) for b in blocks])
        return Pass(torch.arange(len(canvas)), targets, rows_of(targets, 0, self._shift))


class PrefixCache:
    """A full pass opens each block and leaves keys and values for the passes that finish it.

    Fast-dLLM (arXiv:2505.22618): "prefix" keeps those in front of the block and feeds the block and
    all behind it; "dual" keeps those behind it too and feeds the block alone. With shifted logits
    the opening pass commits the block's first slot only: no later pass can predict it.
    """

    def __init__(self, logit_shift: int, *, is_dual: bool) -> None:
        """Keep the variant."""
        self._shift, self._is_dual = logit_shift, is_dual
        self._opened: int | None = None

    def plan(self, canvas: Canvas, blocks: Sequence[Block]) -> Pass:
        """See `CachePolicy`."""
        (block,) = blocks
        targets = canvas.slots(block.start, block.end)
        if block.start != self._opened:
            self._opened = block.start
            targets = targets[:1] if self._shift else targets
            kept = len(canvas) if self._is_dual else block.start
            rows = rows_of(targets, 0, self._shift)
            return Pass(torch.arange(len(canvas)), targets, rows, num_kept=kept)
        rows = rows_of(targets, block.start, self._shift)
        if self._is_dual:
            return Pass(
                torch.arange(block.start, block.end),
                targets,
                rows,
                prefix=len(canvas),
                write=Write.REFRESH,
            )
        return Pass(torch.arange(block.start, len(canvas)), targets, rows, prefix=block.start)


class DelayedCache:
    """Finished blocks are cached after a while, and recomputed now and then (d3LLM).

    A pass is fed what is not cached. It is fed everything, and renews what is cached, while a
    finished block waits for its delay, and every `refresh_interval` passes. A block's K/V are those
    of the first pass at which its delay is over. So a delay that the answer does not reach, or an
    interval of 1, equals `NoCache`. The reference repeats keys when two blocks wait; this does not.
    """

    def __init__(
        self, num_prompt: int, logit_shift: int, delay: int, refresh_interval: int
    ) -> None:
        """Keep the parameters.

        Args:
            num_prompt: P; the prompt is finished before the first pass.
            logit_shift: see `Backbone.logit_shift`. With a shift the last finished token is fed in
                every pass, as it predicts the first slot.
            delay: passes between the one that finishes a block and the one that caches it.
            refresh_interval: passes from one renewal to the next.
        """
        self._shift, self._delay, self._interval = logit_shift, delay, refresh_interval
        self._finished = [(0, num_prompt)]  # by which pass, up to where
        self._num_passes = self._num_held = 0

    def plan(self, canvas: Canvas, blocks: Sequence[Block]) -> Pass:
        """See `CachePolicy`."""
        self._num_passes += 1
        if blocks[0].start > self._finished[-1][1]:
            self._finished.append((self._num_passes, blocks[0].start))
        ready = [end for at, end in self._finished if self._num_passes - at >= self._delay]
        end = max(0, ready[-1] - self._shift) if ready else 0
        waits = len(ready) < len(self._finished)
        first = 0 if waits or self._num_passes % self._interval == 0 else self._num_held
        self._num_held = end
        targets = torch.cat([canvas.slots(b.start, b.end) for b in blocks])
        rows = rows_of(targets, first, self._shift)
        return Pass(
            torch.arange(first, len(canvas)), targets, rows, prefix=first, num_kept=end - first
        )


class FeatureReuse:
    """Every pass is fed the whole canvas, and its layers compute what `FeatureCache` says.

    dLLM-Cache (arXiv:2506.06295). With shifted logits the prompt's last token, which predicts the
    first slot, counts as response.
    """

    def __init__(
        self,
        num_prompt: int,
        logit_shift: int,
        prompt_interval: int,
        response_interval: int,
        transfer_ratio: float,
    ) -> None:
        """Keep the parameters, see `FeatureCache`."""
        self._shift, self._has_run = logit_shift, False
        self._features = FeatureCache(
            num_prompt - logit_shift, prompt_interval, response_interval, transfer_ratio
        )

    def plan(self, canvas: Canvas, blocks: Sequence[Block]) -> Pass:
        """See `CachePolicy`."""
        plan = replace(
            NoCache(self._shift).plan(canvas, blocks),
            prefix=len(canvas) if self._has_run else 0,
            num_kept=0 if self._has_run else len(canvas),
            write=Write.REFRESH if self._has_run else Write.SCRATCH,
            features=self._features,
        )
        self._has_run = True
        return plan


class FrozenBlocks:
    """Blocks keep the keys and values of the last pass that worked on them.

    FreeCache (FlashDLM, arXiv:2505.21467): the first pass is fed everything, later ones the block
    and all behind it. As in the reference what the block's last pass predicts is frozen as masked.
    With shifted logits a block is fed the token in front of it too, which predicts its first slot.
    """

    def __init__(self, logit_shift: int) -> None:
        """Keep where a slot is predicted; see `Backbone.logit_shift`."""
        self._shift, self._has_run = logit_shift, False

    def plan(self, canvas: Canvas, blocks: Sequence[Block]) -> Pass:
        """See `CachePolicy`."""
        (block,) = blocks
        first = block.start - self._shift if self._has_run else 0
        self._has_run = True
        targets = canvas.slots(block.start, block.end)
        return Pass(
            torch.arange(first, len(canvas)),
            targets,
            rows_of(targets, first, self._shift),
            prefix=first,
            # The next pass of the block forgets them again, that of another block does not.
            num_kept=block.end - self._shift - first,
        )


class EntropyRefresh:
    """Everything is computed anew after a pass that committed an unsure token. Rule and cache.

    EntropyCache (arXiv:2603.18489). Other passes are fed the block's masked slots, what the pass
    before committed, and the tokens committed last; their K/V are renewed in place. With shifted
    logits the tokens in front of the slots are fed too. A threshold below every entropy equals
    `NoCache`.
    """

    def __init__(self, rule: UnmaskRule, logit_shift: int, threshold: float, recent: int) -> None:
        """Keep the parameters.

        Args:
            rule: what is committed.
            logit_shift: see `Backbone.logit_shift`.
            threshold: nats; a committed token of a larger entropy makes the next pass full.
            recent: how many tokens of earlier passes are fed.
        """
        self._rule, self._shift = rule, logit_shift
        self._threshold, self._num_recent = threshold, recent
        self._recent = torch.empty(0, dtype=torch.long)  # the last ones at the end
        self._is_stale = True

    def choose(self, slots: Slots, blocks: Sequence[Block]) -> Tensor:
        """See `UnmaskRule`."""
        index = self._rule.choose(slots, blocks)
        self._is_stale = bool((slots.entropy[index] > self._threshold).any())
        count = max(self._num_recent, len(index))
        self._recent = torch.cat([self._recent, slots.positions[index]])[-count:]
        return index

    def plan(self, canvas: Canvas, blocks: Sequence[Block]) -> Pass:
        """See `CachePolicy`."""
        if self._is_stale:
            return replace(NoCache(self._shift).plan(canvas, blocks), num_kept=len(canvas))
        targets = torch.cat([canvas.slots(b.start, b.end) for b in blocks])
        fed = torch.unique(torch.cat([targets, targets - self._shift, self._recent]))
        rows = torch.searchsorted(fed, targets - self._shift)
        return Pass(fed, targets, rows, prefix=len(canvas), write=Write.REFRESH)
