"""Published systems: their parameters and defaults, and the three policies that each is.

docs/papers.md lists them with their deviations. Next: hybrid/decode/denoise.py.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from hybrid.decode.policies import Count, DenoisePreset, Denoiser, Share, Threshold
from hybrid.drafters.denoise import rules
from hybrid.drafters.denoise.caches import DelayedCache, FeatureReuse, NoCache, PrefixCache
from hybrid.drafters.denoise.cycles import Cycles
from hybrid.drafters.denoise.multi_block import MultiBlock, SurestAlways
from hybrid.drafters.denoise.rules import EntropyBounded, Factor, Unmask
from hybrid.drafters.denoise.schedules import DreamSteps, IndependentSteps, SemiAutoregressive
from hybrid.protocols import Backbone

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def dream_top_k(backbone: Backbone) -> int:
    """Return 50 for Dream, 0 otherwise.

    Dream's own generate takes transformers' default top_k from the model's config, so its
    confidences and entropies are those of the 50 best tokens, in greedy decoding too.
    """
    return 50 if backbone.logit_shift else 0


class LLaDA(DenoisePreset):
    """LLaDA (arXiv:2502.09992): semi-autoregressive blocks, an even quota of slots per pass.

    Attributes:
        steps: passes for the whole answer, at least one per block; None is one per token.
        block_size: None is the whole answer.
        remasking: commit the most confident slots, or random ones (give a seed to repeat them).
        cfg_scale: weight of classifier-free guidance; 0 is none.
        temperature: None is the request's.
    """

    steps: Count | None = None
    block_size: Count | None = None
    remasking: Literal["low_confidence", "random"] = "low_confidence"
    cfg_scale: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None

    def start(self, backbone: Backbone, num_prompt: int, max_new_tokens: int) -> Denoiser:
        """See `DenoisePreset`."""
        steps, size = self.steps or max_new_tokens, self.block_size or max_new_tokens
        score = rules.confidence if self.remasking == "low_confidence" else rules.arbitrary
        return Denoiser(
            SemiAutoregressive(num_prompt, max_new_tokens, size, steps),
            Unmask(score),
            NoCache(backbone.logit_shift),
            guidance=self.cfg_scale,
            raw_confidence=True,
        )


class FastDLLM(DenoisePreset):
    """Fast-dLLM (arXiv:2505.22618): every slot that is sure enough, with an approximate cache.

    Attributes:
        block_size: positions of a block.
        threshold: confidence from which on a slot is committed; the best one always is. 0.9 where
            neither this nor one of the next two is given.
        factor: instead of a threshold, see `Factor`.
        steps: instead of a threshold, passes for the whole answer, at least one per block.
        cache: none, prefix, dual.
    """

    block_size: Count = 32
    threshold: Threshold | None = None
    factor: _Positive | None = None
    steps: Count | None = None
    cache: Literal["none", "prefix", "dual"] = "dual"

    @model_validator(mode="after")
    def _one_rule(self) -> FastDLLM:
        given = [n for n in ("threshold", "factor", "steps") if getattr(self, n) is not None]
        if len(given) > 1:
            raise ValueError(f"got {' and '.join(given)}, expected one of them.")
        return self

    def start(self, backbone: Backbone, num_prompt: int, max_new_tokens: int) -> Denoiser:
        """See `DenoisePreset`."""
        is_default = self.threshold is None and self.factor is None and self.steps is None
        threshold = 0.9 if is_default else self.threshold
        shift = backbone.logit_shift
        return Denoiser(
            SemiAutoregressive(num_prompt, max_new_tokens, self.block_size, self.steps),
            Unmask(threshold=threshold) if self.factor is None else Factor(self.factor),
            NoCache(shift)
            if self.cache == "none"
            else PrefixCache(shift, is_dual=self.cache == "dual"),
            raw_confidence=not backbone.logit_shift,
            top_k=dream_top_k(backbone),
        )


class Dream(DenoisePreset):
    """Dream (arXiv:2508.15487): the whole answer at once, a share of the slots per step.

    Attributes:
        steps: T; None is one per token, at most 512.
        eps: time of the last step.
        algorithm: how slots are ranked; "origin" commits each with the step's share as its odds.
        algorithm_temperature: above 0, slots are drawn by their scores instead of ranked.
        temperature: None is the request's, as for the next two.
        top_p: see `SamplingParams`.
        top_k: likewise; the request's 0 is Dream's own 50.
    """

    steps: Count | None = None
    eps: Annotated[float, Field(gt=0, lt=1)] = 1e-3
    algorithm: Literal["origin", "maskgit_plus", "topk_margin", "entropy"] = "entropy"
    algorithm_temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Count | None = None

    def start(self, backbone: Backbone, num_prompt: int, max_new_tokens: int) -> Denoiser:
        """See `DenoisePreset`."""
        layout = num_prompt, max_new_tokens, self.steps or min(max_new_tokens, 512), self.eps
        cache, top_k = NoCache(backbone.logit_shift), dream_top_k(backbone)
        if self.algorithm == "origin":
            both = IndependentSteps(*layout)
            return Denoiser(both, both, cache, top_k=top_k)
        scores = {
            "maskgit_plus": rules.confidence,
            "topk_margin": rules.margin,
            "entropy": rules.certainty,
        }
        score: rules.Score = scores[self.algorithm]
        if self.algorithm_temperature > 0:
            score = rules.drawn(score, self.algorithm_temperature)
        return Denoiser(DreamSteps(*layout), Unmask(score), cache, top_k=top_k)


class D3LLM(DenoisePreset):
    """d3LLM (arXiv:2601.07568): slots of low entropy in a window of several blocks.

    Attributes:
        block_size: positions of a block.
        entropy_threshold: nats up to which a slot is committed.
        block_add_threshold: share of the last block that is known when the next one opens; from 1
            on it is the whole.
        block_activate_threshold: the reference's `decoded_token_threshold`. It decides nothing, see
            `MultiBlock`.
        cache: none, or delayed, see `DelayedCache`.
        cache_delay: passes between the one that finishes a block and the one that caches it.
        refresh_interval: passes from one renewal of the cache to the next.
        early_stop: what is behind an EOS is filled with EOS.
    """

    block_size: Count = 32
    entropy_threshold: Annotated[float, Field(ge=0)] = 0.5
    block_add_threshold: Threshold = 0.1
    block_activate_threshold: Share = 0.95
    cache: Literal["none", "delayed"] = "none"
    cache_delay: Annotated[int, Field(ge=0)] = 2
    refresh_interval: Count = 3
    early_stop: bool = True

    def start(self, backbone: Backbone, num_prompt: int, max_new_tokens: int) -> Denoiser:
        """See `DenoisePreset`."""
        shift = backbone.logit_shift
        eos = backbone.eos_token_ids if self.early_stop else ()
        rule = Unmask(rules.certainty, -self.entropy_threshold, is_strict=bool(shift))
        delay, interval = self.cache_delay, self.refresh_interval
        return Denoiser(
            MultiBlock(num_prompt, max_new_tokens, self.block_size, self.block_add_threshold, eos),
            rule if shift else SurestAlways(rule),
            NoCache(shift)
            if self.cache == "none"
            else DelayedCache(num_prompt, shift, delay, interval),
            raw_confidence=True,
        )


class SlowFast(DenoisePreset):
    """SlowFast sampling (arXiv:2506.10848): look how far the model is sure, then decode there.

    Attributes:
        block_size: positions of a block.
        k_exploration_steps: passes of a slow phase.
        cycle_len_confidence_threshold: confidence that counts for the end of a cycle.
        cycle_length_stability_window: so many estimates of it in a row must agree,
        cycle_length_stability_std_dev_threshold: their standard deviation being less than this.
        high_confidence_threshold: confidence from which on a slot is committed; the best always is.
        cache: "dllm-cache" reuses features between passes as that preset does, by the next three.
        prompt_interval_steps: passes from one refresh of the prompt to the next.
        gen_interval_steps: likewise for the answer.
        transfer_ratio: share of the answer that each pass between them computes.
    """

    block_size: Count = 128
    k_exploration_steps: Count = 6
    cycle_len_confidence_threshold: Threshold = 0.3
    cycle_length_stability_window: Count = 2
    cycle_length_stability_std_dev_threshold: Annotated[float, Field(ge=0)] = 1.0
    high_confidence_threshold: Threshold = 0.9
    cache: Literal["none", "dllm-cache"] = "none"
    prompt_interval_steps: Count = 25
    gen_interval_steps: Count = 7
    transfer_ratio: Share = 0.25

    def start(self, backbone: Backbone, num_prompt: int, max_new_tokens: int) -> Denoiser:
        """See `DenoisePreset`."""
        shift = backbone.logit_shift
        intervals = self.prompt_interval_steps, self.gen_interval_steps
        cycles = Cycles(
            NoCache(shift)
            if self.cache == "none"
            else FeatureReuse(num_prompt, shift, *intervals, self.transfer_ratio),
            num_prompt,
            max_new_tokens,
            self.block_size,
            num_slow=self.k_exploration_steps,
            sure=self.cycle_len_confidence_threshold,
            very_sure=self.high_confidence_threshold,
            window=self.cycle_length_stability_window,
            max_deviation=self.cycle_length_stability_std_dev_threshold,
        )
        return Denoiser(cycles, cycles, cycles, raw_confidence=True)


class EntropyBound(DenoisePreset):
    """EB-Sampler (arXiv:2505.24857): as many slots as a bound on their entropies allows.

    Attributes:
        block_size: None is the whole answer.
        gamma: nats that the entropies of the slots before one may sum to, the surest first.
    """

    block_size: Count | None = None
    gamma: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1

    def start(self, backbone: Backbone, num_prompt: int, max_new_tokens: int) -> Denoiser:
        """See `DenoisePreset`."""
        size = self.block_size or max_new_tokens
        return Denoiser(
            SemiAutoregressive(num_prompt, max_new_tokens, size),
            EntropyBounded(self.gamma),
            NoCache(backbone.logit_shift),
            raw_confidence=not backbone.logit_shift,
            top_k=dream_top_k(backbone),
        )
