"""Systems that are a way to reuse what earlier passes computed. Next: hybrid/decode/denoise.py."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from hybrid.decode.policies import Count, DenoisePreset, Denoiser, Share
from hybrid.drafters.denoise.caches import EntropyRefresh, FeatureReuse, FrozenBlocks
from hybrid.drafters.denoise.rules import Unmask
from hybrid.drafters.denoise.schedules import SemiAutoregressive
from hybrid.protocols import Backbone


class DLLMCache(DenoisePreset):
    """dLLM-Cache (arXiv:2506.06295) on LLaDA's sampler.

    Attributes:
        steps: passes for the whole answer; None is one per token.
        block_size: None is the whole answer.
        prompt_interval_steps: passes from one refresh of the prompt to the next.
        gen_interval_steps: likewise for the answer.
        transfer_ratio: share of the answer that each pass between them computes.
    """

    steps: Count | None = None
    block_size: Count | None = None
    prompt_interval_steps: Count = 25
    gen_interval_steps: Count = 7
    transfer_ratio: Share = 0.25

    def start(self, backbone: Backbone, num_prompt: int, max_new_tokens: int) -> Denoiser:
        """See `DenoisePreset`."""
        steps, size = self.steps or max_new_tokens, self.block_size or max_new_tokens
        return Denoiser(
            SemiAutoregressive(num_prompt, max_new_tokens, size, steps),
            Unmask(),
            FeatureReuse(
                num_prompt,
                backbone.logit_shift,
                self.prompt_interval_steps,
                self.gen_interval_steps,
                self.transfer_ratio,
            ),
            raw_confidence=True,
        )


class EntropyCache(DenoisePreset):
    """EntropyCache (arXiv:2603.18489) on blocks that commit every slot that is sure enough.

    Attributes:
        block_size: positions of a block.
        threshold: confidence from which on a slot is committed; the best one always is.
        entropy_threshold: nats; a committed token of a larger entropy makes the next pass full.
        recent: tokens of earlier passes that are computed with the masked slots.
    """

    block_size: Count = 32
    threshold: Share = 0.9
    entropy_threshold: Annotated[float, Field(ge=0)] = 1.0
    recent: Annotated[int, Field(ge=0)] = 16

    def start(self, backbone: Backbone, num_prompt: int, max_new_tokens: int) -> Denoiser:
        """See `DenoisePreset`."""
        rule = Unmask(threshold=self.threshold)
        cache = EntropyRefresh(rule, backbone.logit_shift, self.entropy_threshold, self.recent)
        schedule = SemiAutoregressive(num_prompt, max_new_tokens, self.block_size)
        return Denoiser(schedule, cache, cache, raw_confidence=True)


class FreeCache(DenoisePreset):
    """FreeCache of FlashDLM (arXiv:2505.21467) on LLaDA's sampler.

    Attributes:
        steps: passes for the whole answer; None is one per token.
        block_size: positions of a block.
    """

    steps: Count | None = None
    block_size: Count = 32

    def start(self, backbone: Backbone, num_prompt: int, max_new_tokens: int) -> Denoiser:
        """See `DenoisePreset`."""
        steps = self.steps or max_new_tokens
        return Denoiser(
            SemiAutoregressive(num_prompt, max_new_tokens, self.block_size, steps),
            Unmask(),
            FrozenBlocks(backbone.logit_shift),
            raw_confidence=True,
        )
