"""Guided diffusion (FlashDLM, arXiv:2505.21467): an AR model says how many predictions may stay.

A pass of the diffusion model predicts all slots that are masked; the guide reads the predictions
from left to right and stops at the first that it finds improbable. It writes nothing itself: where
it accepts none, the leftmost prediction stays. Its keys and values are those of its own causal
decoding. Next: hybrid/decode/denoise.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, PrivateAttr
from torch import Tensor

from hybrid.attention.pattern import causal
from hybrid.decode.canvas import Block, Canvas, Pass
from hybrid.decode.policies import Count, DenoisePreset, Denoiser, Share
from hybrid.decode.slots import Slots
from hybrid.drafters.denoise.caches import NoCache
from hybrid.drafters.denoise.schedules import SemiAutoregressive
from hybrid.errors import ConfigError
from hybrid.models.loading import load_model
from hybrid.protocols import Backbone
from hybrid.types import Write

_PADDING = 512  # rows that a vocabulary may have beyond its tokenizer's tokens


class Guided(DenoisePreset):
    """FlashDLM's guided diffusion (arXiv:2505.21467).

    The guide's passes are its own and not among the model's forwards.

    Attributes:
        guide: an AR model with the same tokenizer: its folder or name, or a `Backbone`.
        sampling_strategy: which predictions it accepts. "deterministic": its own choice.
            "dynamic_threshold": what it gives more than `confidence_threshold`. "topk": one of its
            `acceptance_top_k` best. "topk_relative": one of these that has at least
            `relative_threshold` times the probability of the best. "aggressive": one of its five
            best, or of more than 0.05, or of its nucleus of 0.95. "original": by chance, with the
            probability that it gives.
        confidence_threshold: see above.
        acceptance_top_k: see above.
        relative_threshold: see above (the reference's `top_p`).
        verify_batch_size: predictions that a pass of the guide reads at most.
    """

    guide: Any = None
    sampling_strategy: Literal[
        "deterministic", "dynamic_threshold", "topk", "topk_relative", "aggressive", "original"
    ] = "topk_relative"
    confidence_threshold: Annotated[float, Field(ge=0, lt=1)] = 0.1
    acceptance_top_k: Count = 2
    relative_threshold: Share = 0.5
    verify_batch_size: Count = 32

    _loaded: Any = PrivateAttr(None)

    def start(self, backbone: Backbone, num_prompt: int, max_new_tokens: int) -> Denoiser:
        """See `DenoisePreset`. The guide is loaded for the first row."""
        guide = self._find(backbone)
        both = GuidedPasses(self, guide, NoCache(backbone.logit_shift), num_prompt + max_new_tokens)
        schedule = SemiAutoregressive(num_prompt, max_new_tokens, max_new_tokens)
        return Denoiser(schedule, both, both)

    def accepts(self, probs: Tensor, tokens: Tensor, chance: Tensor) -> Tensor:
        """Return which predictions the guide accepts, each by itself [n].

        Args:
            probs: [n, V] of the guide.
            tokens: [n] predicted ids below V.
            chance: [n] numbers in [0, 1) of the row's own stream.
        """
        own = probs.gather(1, tokens[:, None])
        rank = (probs > own).sum(dim=1)
        share = own[:, 0]
        if self.sampling_strategy == "deterministic":
            return probs.argmax(dim=1) == tokens
        if self.sampling_strategy == "dynamic_threshold":
            return share > self.confidence_threshold
        if self.sampling_strategy == "original":
            return chance < share
        if self.sampling_strategy == "aggressive":
            nucleus = probs.masked_fill(probs < own, 0).sum(dim=1) <= 0.95
            return (rank < 5) | (share > 0.05) | nucleus
        is_near = share >= self.relative_threshold * probs.amax(dim=1)
        return (rank < self.acceptance_top_k) & (is_near | (self.sampling_strategy == "topk"))

    def _find(self, backbone: Backbone) -> Backbone:
        if self._loaded is None:
            if self.guide is None:
                raise ConfigError(
                    "guide: got nothing, expected a folder: an AR model with the same tokenizer."
                )
            self._loaded = self.guide
            if isinstance(self.guide, (str, Path)):
                dtype = str(backbone.dtype).removeprefix("torch.")
                self._loaded = load_model(
                    self.guide, device=str(backbone.device), dtype=dtype
                ).backbone
        if not hasattr(self._loaded, "can_verify"):
            raise ConfigError(
                f"guide: got {type(self.guide).__name__}, expected a folder, a name or a Backbone."
            )
        guide: Backbone = self._loaded
        if abs(guide.vocab_size - backbone.vocab_size) > _PADDING or not guide.can_verify:
            raise ConfigError(
                f"guide: got {guide.vocab_size} tokens and "
                f"{'an AR model' if guide.can_verify else 'a model that is not autoregressive'}, "
                f"expected an AR model with the tokenizer of this one ({backbone.vocab_size})."
            )
        return guide


class GuidedPasses:
    """Unmask rule and cache policy of one row: the guide must know the whole text."""

    _canvas: Canvas

    def __init__(self, settings: Guided, guide: Backbone, cache: NoCache, length: int) -> None:
        """Keep the parts.

        Args:
            settings: say what the guide accepts.
            guide: the AR model.
            cache: of the diffusion model.
            length: of the canvas.
        """
        self._settings, self._guide, self._cache = settings, guide, cache
        self._known = guide.new_cache(1, length)

    def plan(self, canvas: Canvas, blocks: Sequence[Block]) -> Pass:
        """See `CachePolicy`."""
        self._canvas = canvas
        return self._cache.plan(canvas, blocks)

    def choose(self, slots: Slots, blocks: Sequence[Block]) -> Tensor:
        """See `UnmaskRule`. What is masked is one stretch: commits go from left to right."""
        first, size = int(slots.positions[0]), self._settings.verify_batch_size
        text = torch.cat([self._canvas.tokens[:first], slots.tokens])
        chance = slots.random if self._settings.sampling_strategy == "original" else slots.positions
        num_accepted, count = 0, 0
        while num_accepted == count < len(slots):
            count = min(count + size, len(slots))
            own = slice(num_accepted, count)
            tokens = slots.tokens[own]
            probs = self._probs(text[: first + count - 1], len(tokens))
            is_known = tokens < probs.shape[1]
            accepted = self._settings.accepts(probs, tokens * is_known, chance[own]) & is_known
            num_accepted += int(accepted.cumprod(dim=0).sum())
        num_chosen = max(num_accepted, 1)
        # The last token is read again: what it says is asked for next time.
        self._known.truncate(0, min(first + num_chosen - 1, self._known.lengths[0]))
        return torch.arange(num_chosen)

    def _probs(self, text: Tensor, count: int) -> Tensor:
        """Feed what of `text` the guide has not read. Returns its last `count` laws [count, V]."""
        guide, start, probs = self._guide, self._known.lengths[0], torch.empty(0)
        text = text.clamp(max=guide.vocab_size - 1)[None].to(guide.device)
        while start < text.shape[1]:
            # The rows that are wanted share the last pass.
            end = min(start + guide.prefill_chunk, text.shape[1] - count)
            end = end if end > start else text.shape[1]
            out = guide.forward(
                text[:, start:end],
                torch.arange(start, end, device=guide.device)[None],
                causal([start], end - start),
                self._known,
                [0],
                write=Write.COMMIT,
                num_logits=count if end == text.shape[1] else 0,
            )
            start = end
            if out.logits is not None:
                probs = out.logits[0].float().softmax(dim=-1).cpu()
        return probs
