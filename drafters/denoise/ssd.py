"""SSD (arXiv:2510.04147): a diffusion model drafts its own next states and verifies them.

Denoising a slot per pass, by confidence, is the reference. What a pass predicts for the slots that
it leaves is a good guess at the next passes' choices, so the states that they would lead to share
the next forward. The rule itself says which of them come true: the tokens are those of one pass per
slot, sampled ones too. Next: hybrid/decode/denoise.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hybrid.decode.canvas import Block, Canvas, Guess, Pass
from hybrid.decode.policies import Count, DenoisePreset, Denoiser
from hybrid.decode.slots import Slots
from hybrid.drafters.denoise.caches import NoCache
from hybrid.drafters.denoise.rules import Unmask, best
from hybrid.drafters.denoise.schedules import SemiAutoregressive
from hybrid.protocols import Backbone


class SelfSpeculation:
    """Unmask rule and cache policy: what the rule leaves in one pass the next pass guesses."""

    def __init__(
        self, cache: NoCache, layout: tuple[int, int, int], depth: int, width: int
    ) -> None:
        """Keep the parts.

        Args:
            cache: plans the pass of each state.
            layout: arguments of `SemiAutoregressive`.
            depth: states of a chain, the certain one included.
            width: chains; each begins with another of the surest slots.
        """
        self._rule, self._cache, self._layout = Unmask(), cache, layout
        self._depth, self._width = depth, width
        self._left = torch.empty(2, 0, dtype=torch.long)  # slots and tokens, the surest first

    def choose(self, slots: Slots, blocks: Sequence[Block]) -> Tensor:
        """See `UnmaskRule`."""
        chosen = self._rule.choose(slots, blocks)
        order = best(slots.confidence, len(slots))
        order = order[~torch.isin(order, chosen)]
        self._left = torch.stack([slots.positions[order], slots.tokens[order]])
        return chosen

    def plan(self, canvas: Canvas, blocks: Sequence[Block]) -> Pass:
        """See `CachePolicy`."""
        guesses = [self._guess(canvas, index) for index in self._tree()]
        complete = len(canvas)
        return replace(
            self._cache.plan(canvas, blocks),
            guesses=tuple(
                Guess(guess, self._cache.plan(guess, SemiAutoregressive(*self._layout).open(guess)))
                for guess in guesses
                if guess.first_masked < complete  # else no pass would follow
            ),
        )

    def _tree(self) -> list[list[int]]:
        """Return which of the slots that are left each guess fills; two chains may share one."""
        count, longest = self._left.shape[1], self._depth - 1
        states: dict[frozenset[int], list[int]] = {}
        for first in range(min(self._width, count)):
            chain = [first, *(i for i in range(min(longest, count)) if i != first)]
            for size in range(1, min(longest, count) + 1):
                states.setdefault(frozenset(chain[:size]), chain[:size])
        return list(states.values())

    def _guess(self, canvas: Canvas, index: list[int]) -> Canvas:
        guess = canvas.copy()
        guess.commit(*self._left[:, index])
        return guess


class SSD(DenoisePreset):
    """Self-speculative decoding (arXiv:2510.04147): a slot per pass in fewer passes, losslessly.

    Its tokens are those of `llada` with as many steps as tokens.

    Attributes:
        block_size: None is the whole answer.
        depth: states of a chain that share a forward; 1 guesses nothing.
        width: chains, each beginning with another of the surest slots.
    """

    block_size: Count | None = None
    depth: Count = 4
    width: Count = 1

    def start(self, backbone: Backbone, num_prompt: int, max_new_tokens: int) -> Denoiser:
        """See `DenoisePreset`."""
        layout = (num_prompt, max_new_tokens, self.block_size or max_new_tokens)
        both = SelfSpeculation(NoCache(backbone.logit_shift), layout, self.depth, self.width)
        return Denoiser(
            SemiAutoregressive(*layout),
            both,
            both,
            raw_confidence=True,
            num_guesses=self.width * (self.depth - 1),
        )
