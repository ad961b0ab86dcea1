"""Published systems with a causal context: their parameters, and the three policies of each.

What is finished never changes, so their caches are exact. docs/papers.md lists the deviations.
Next: drafters/denoise/block_cache.py.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from hybrid.decode.policies import Count, DenoisePreset, Denoiser, Share, Threshold, UnmaskRule
from hybrid.drafters.denoise import rules
from hybrid.drafters.denoise.block_cache import BlockCache, CausalCache, SubBlockCache
from hybrid.drafters.denoise.block_grid import Grid
from hybrid.drafters.denoise.block_rules import Rewrite
from hybrid.drafters.denoise.block_schedules import (
    BlockWindow,
    BridgedBlocks,
    RewrittenBlocks,
    SteppedBlocks,
)
from hybrid.drafters.denoise.rules import EntropyBounded, Unmask
from hybrid.errors import ConfigError
from hybrid.protocols import Backbone
from hybrid.types import Context


class SDAR(DenoisePreset):
    """SDAR (arXiv:2510.06303): one small block after the other, at absolute positions.

    Attributes:
        block_size: None is what the model was trained with, else 4.
        steps: passes per block at most; None is one per slot.
        strategy: which slots a pass commits. "sequential": the leftmost, "low_confidence_static":
            the most confident, both by quota. "low_confidence_dynamic": all above the threshold,
            the quota at least. "entropy_bounded": see `EntropyBounded`, the quota at least.
        threshold: confidence, or nats with "entropy_bounded"; None is 0.85, or 0.1 nats.
    """

    contexts: ClassVar[tuple[Context, ...]] = (Context.BLOCK_CAUSAL,)

    block_size: Count | None = None
    steps: Count | None = None
    strategy: Literal[
        "sequential", "low_confidence_static", "low_confidence_dynamic", "entropy_bounded"
    ] = "low_confidence_dynamic"
    threshold: Threshold | None = None

    def start(self, backbone: Backbone, num_prompt: int, max_new_tokens: int) -> Denoiser:
        """See `DenoisePreset`."""
        grid = Grid(self.block_size or backbone.block_size or 4)
        return Denoiser(
            SteppedBlocks(grid, num_prompt, max_new_tokens, self.steps or grid.size),
            self._rule(),
            BlockCache(grid, backbone.logit_shift, chunk=backbone.prefill_chunk),
        )

    def _rule(self) -> UnmaskRule:
        if self.strategy == "sequential":
            return Unmask(rules.leftmost)
        if self.strategy == "low_confidence_static":
            return Unmask()
        if self.strategy == "entropy_bounded":
            return EntropyBounded(0.1 if self.threshold is None else self.threshold)
        return Unmask(threshold=0.85 if self.threshold is None else self.threshold, is_strict=True)


class LLaDA2(DenoisePreset):
    """LLaDA2.0: one block after the other, at absolute positions; every slot that is sure enough.

    Attributes:
        block_size: positions of a block.
        steps: passes per block at most; `max_new_tokens` // `min_commit` caps it.
        threshold: confidence above which a slot is committed; the quota always is.
        min_commit: see `steps`.
    """

    contexts: ClassVar[tuple[Context, ...]] = (Context.BLOCK_CAUSAL,)

    block_size: Count = 32
    steps: Count = 32
    threshold: Threshold = 0.95
    min_commit: Count = 1

    def start(self, backbone: Backbone, num_prompt: int, max_new_tokens: int) -> Denoiser:
        """See `DenoisePreset`."""
        grid = Grid(self.block_size)
        steps = max(1, min(self.steps, max_new_tokens // self.min_commit))
        return Denoiser(
            SteppedBlocks(grid, num_prompt, max_new_tokens, steps),
            Unmask(threshold=self.threshold, is_strict=True),
            BlockCache(grid, backbone.logit_shift, chunk=backbone.prefill_chunk),
        )


class LLaDA21(DenoisePreset):
    """LLaDA2.1: as LLaDA2.0, and the tokens of the block may still be replaced.

    Attributes:
        block_size: positions of a block.
        threshold: confidence above which a slot is committed.
        edit_threshold: confidence above which another token replaces a committed one; more than 1
            never does.
        max_post_steps: passes for replacing at most, once no slot is masked.
        num_to_transfer: slots that a pass commits at least.
    """

    contexts: ClassVar[tuple[Context, ...]] = (Context.BLOCK_CAUSAL,)

    block_size: Count = 32
    threshold: Threshold = 0.95
    edit_threshold: Threshold = 0.9
    max_post_steps: Annotated[int, Field(ge=0)] = 16
    num_to_transfer: Count = 1

    def start(self, backbone: Backbone, num_prompt: int, max_new_tokens: int) -> Denoiser:
        """See `DenoisePreset`."""
        grid = Grid(self.block_size)
        schedule = RewrittenBlocks(
            grid, num_prompt, max_new_tokens, self.num_to_transfer, self.max_post_steps
        )
        shift, chunk = backbone.logit_shift, backbone.prefill_chunk
        return Denoiser(
            schedule,
            Rewrite(self.threshold, self.edit_threshold),
            BlockCache(grid, shift, chunk=chunk, rewrites=True),
        )


class D2F(DenoisePreset):
    """D2F (arXiv:2508.09192): a pipeline of blocks behind a prompt that is one block.

    It runs LLaDA and Dream block-causally, for which their D2F adapters were trained.

    Attributes:
        block_size: positions of a block.
        confidence_threshold: confidence above which a slot is committed.
        block_add_threshold: share of committed slots in the last block from which on another
            block joins.
        block_activate_threshold: share in the block before, from which on a block commits its
            best slot if none is sure enough.
    """

    contexts: ClassVar[tuple[Context, ...]] = (Context.BIDIRECTIONAL, Context.BLOCK_CAUSAL)

    block_size: Count = 32
    confidence_threshold: Threshold = 0.9
    block_add_threshold: Share = 0.1
    block_activate_threshold: Share = 0.95

    def start(self, backbone: Backbone, num_prompt: int, max_new_tokens: int) -> Denoiser:
        """See `DenoisePreset`."""
        grid = Grid(self.block_size, origin=num_prompt)
        add, activate = self.block_add_threshold, self.block_activate_threshold
        return Denoiser(
            BlockWindow(grid, num_prompt, max_new_tokens, add, activate),
            Unmask(threshold=self.confidence_threshold, is_strict=True),
            BlockCache(grid, backbone.logit_shift),
        )

    def misfit(self, backbone: Backbone) -> str | None:
        """Return why a model cannot run it, None if it can."""
        if backbone.context == Context.BLOCK_CAUSAL and backbone.default_strategy != "d2f":
            return "the blocks of this model are counted from the first token, not from the prompt."
        return super().misfit(backbone)


class FastDLLMv2(DenoisePreset):
    """Fast-dLLM v2 (arXiv:2509.26328): blocks at absolute positions, sub-blocks left to right.

    Attributes:
        block_size: None is what the model was trained with, else 32.
        sub_block_size: must divide it.
        threshold: confidence above which a slot is committed; the best one always is.
        sub_block_cache: see `SubBlockCache`.
    """

    contexts: ClassVar[tuple[Context, ...]] = (Context.BLOCK_CAUSAL,)

    block_size: Count | None = None
    sub_block_size: Count = 8
    threshold: Threshold = 0.9
    sub_block_cache: bool = False

    def start(self, backbone: Backbone, num_prompt: int, max_new_tokens: int) -> Denoiser:
        """See `DenoisePreset`."""
        grid = Grid(self.block_size or backbone.block_size or 32)
        if grid.size % self.sub_block_size:
            raise ConfigError(
                f"sub_block_size: got {self.sub_block_size}, expected a divisor of "
                f"the block's {grid.size} positions."
            )
        make = SubBlockCache if self.sub_block_cache else BlockCache
        return Denoiser(
            BridgedBlocks(grid, num_prompt, max_new_tokens, self.sub_block_size),
            Unmask(threshold=self.threshold, is_strict=True),
            make(grid, backbone.logit_shift, chunk=backbone.prefill_chunk),
        )

    def misfit(self, backbone: Backbone) -> str | None:
        """See `DenoisePreset`."""
        problem = super().misfit(backbone)
        if problem is None and backbone.logit_shift == 0:
            problem = "this model predicts a slot in its own place, expected in that before it."
        return problem


class Nemotron(DenoisePreset):
    """Nemotron-Labs-Diffusion (arXiv:2607.05722), its diffusion mode: nothing is verified.

    Attributes:
        block_size: positions of a block, the first of them being the seed.
        threshold: confidence from which on a slot is committed; the best one always is. None
            commits one per pass.
    """

    contexts: ClassVar[tuple[Context, ...]] = (Context.CAUSAL,)

    block_size: Count = 8
    threshold: Threshold | None = 0.9

    def start(self, backbone: Backbone, num_prompt: int, max_new_tokens: int) -> Denoiser:
        """See `DenoisePreset`."""
        grid = Grid(self.block_size, origin=num_prompt)
        return Denoiser(
            BridgedBlocks(grid, num_prompt, max_new_tokens, self.block_size),
            Unmask(threshold=self.threshold),
            CausalCache(backbone.prefill_chunk),
            raw_confidence=True,
        )
