"""Unmask rules: which predictions of a pass become tokens.

Most are one rule, `Unmask`: in each block the slots whose score passes a threshold, and if these
are fewer than the block's quota, the best ones instead. A score is a number per slot, larger is
surer. Next: drafters/denoise/schedules.py.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hybrid.decode.canvas import Block
from hybrid.decode.slots import Slots

Score = Callable[[Slots], Tensor]


def confidence(slots: Slots) -> Tensor:
    """Probability of the predicted token (LLaDA's low-confidence remasking, Dream's maskgit+)."""
    return slots.confidence


def margin(slots: Slots) -> Tensor:
    """Probability of the best token less that of the next (Dream's topk_margin)."""
    return slots.margin


def certainty(slots: Slots) -> Tensor:
    """Negative entropy, nats (Dream's entropy, d3LLM, arXiv:2601.07568)."""
    return -slots.entropy


def leftmost(slots: Slots) -> Tensor:
    """The earlier the surer (SDAR's sequential)."""
    return -slots.positions.double()


def arbitrary(slots: Slots) -> Tensor:
    """A draw from the row's own stream for each slot (LLaDA's random remasking)."""
    return slots.random


def drawn(score: Score, temperature: float) -> Score:
    """Return a score whose best slots are a draw without replacement.

    The odds of a slot are softmax(score / temperature): with Gumbel noise on them, ranking is
    drawing (arXiv:1903.06059).
    """

    def noisy(slots: Slots) -> Tensor:
        return score(slots).double() / temperature - (-slots.random.log()).log()

    return noisy


class Unmask:
    """Slots that pass a threshold; where these are fewer than the quota, the best ones."""

    def __init__(
        self,
        score: Score = confidence,
        threshold: float | None = None,
        *,
        is_strict: bool = False,
    ) -> None:
        """Keep the score and what it must reach.

        Args:
            score: of each slot.
            threshold: None commits the quota alone.
            is_strict: a score equal to the threshold does not pass. Systems differ in it.
        """
        self.score, self.threshold, self.is_strict = score, threshold, is_strict

    def choose(self, slots: Slots, blocks: Sequence[Block]) -> Tensor:
        """See `UnmaskRule`."""
        scores = self.score(slots)
        chosen = [self._in_block(scores, members(slots, b), b.quota) for b in blocks]
        return torch.cat(chosen)

    def _in_block(self, scores: Tensor, index: Tensor, quota: int) -> Tensor:
        own = scores[index]
        if self.threshold is not None:
            passes = own > self.threshold if self.is_strict else own >= self.threshold
            if int(passes.sum()) >= quota:
                return index[passes]
        return index[best(own, quota)]


def members(slots: Slots, block: Block) -> Tensor:
    """Return the indices of a block's masked slots."""
    positions = slots.positions.tolist()  # ascending, and few: cheaper than comparing tensors
    start, end = bisect_left(positions, block.start), bisect_left(positions, block.end)
    index = torch.arange(start, end)
    return index if slots.masked is None else index[slots.masked[start:end]]


def best(scores: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` largest scores, ties to the earliest."""
    return scores.sort(descending=True, stable=True).indices[:count]


class Factor:
    """The most slots n whose n-th confidence is at least 1 - factor / (n + 1), at least one.

    Fast-dLLM (arXiv:2505.22618), its later `factor` rule.
    """

    def __init__(self, factor: float) -> None:
        """Keep the factor: larger commits more."""
        self.factor = factor

    def choose(self, slots: Slots, blocks: Sequence[Block]) -> Tensor:
        """See `UnmaskRule`."""
        chosen = []
        for block in blocks:
            index = members(slots, block)
            ranked, order = slots.confidence[index].sort(descending=True, stable=True)
            counts = torch.arange(1, len(index) + 1)
            enough = (ranked >= 1 - self.factor / (counts + 1)).nonzero()[:, 0]
            count = int(enough[-1]) + 1 if len(enough) else 1
            chosen.append(index[order[:count]])
        return torch.cat(chosen)


class EntropyBounded:
    """Slots by rising entropy while the entropies before them add up to at most gamma.

    The first always passes. EB-Sampler (arXiv:2505.24857), as DiffusionGemma and Set Block Decoding
    (arXiv:2509.04185) use it.
    """

    def __init__(self, gamma: float) -> None:
        """Keep the bound, nats."""
        self.gamma = gamma

    def choose(self, slots: Slots, blocks: Sequence[Block]) -> Tensor:
        """See `UnmaskRule`."""
        chosen = []
        for block in blocks:
            index = members(slots, block)
            ranked, order = slots.entropy[index].sort(stable=True)
            before = torch.cat([ranked.new_zeros(1), ranked.cumsum(0)[:-1]])[: len(index)]
            count = max(int((before <= self.gamma).sum()), min(block.quota, len(index)))
            chosen.append(index[order[:count]])
        return torch.cat(chosen)
