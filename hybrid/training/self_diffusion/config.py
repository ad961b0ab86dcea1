"""Configuration of the self-diffusion recipe.

Next: hybrid/training/self_diffusion/draft_model.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field

from hybrid.training.config import Positive, Rate, TrainConfig

_Count = Annotated[int, Field(ge=0)]
_Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_Share = Annotated[float, Field(ge=0, le=1)]


class SelfDiffusionConfig(TrainConfig):
    """How a diffusion adapter is trained; the fields of `TrainConfig`, and these.

    Attributes:
        num_draft_tokens: K, tokens drafted behind the anchor.
        short_draft_tokens: slots of the steps that train a short draft instead of K.
        short_share: share of such steps.
        entry_layer: first layer of the draft pass; 0 runs the whole model, and slots enter as
            tokens. None is two thirds up the model.
        feature_layers: layers whose output at the anchor's predecessor enters the draft input;
            none with entry_layer 0. None is four over the height of the model.
        rank: r of the low-rank updates.
        lora_alpha: scale of the updates is lora_alpha / rank.
        targets: projections that get low-rank updates.
        train_norms: give the draft pass norms of its own; without them, entry_layer 0,
            sampler_size 0 and the whole vocabulary make a plain PEFT adapter.
        corruption: "mask" drafts from masked slots that see each other; "uniform" from random
            tokens under causal attention, the anchor's row with the base weights, as SGLang's UNO
            does; it needs a plain adapter.
        mask_token_id: token of a masked slot with entry_layer 0; None takes the model's own mask
            token, or a special one that the data leave free.
        num_passes: denoising passes of a draft; each but the last tells the next its surest tokens,
            and training shows slots that many true tokens.
        sampler_size: inner width of the head that makes a slot's choice know the tokens chosen
            before it (arXiv:2507.11851); 0 is none.
        draft_vocab_size: the draft chooses among so many tokens, the most frequent in the
            responses. None is every token that occurs there, filled up to a multiple of 16; a
            plain adapter drafts from all tokens.
        preferred_draft_tokens: K of decoding when nobody asks for another; None is
            num_draft_tokens. A preference of the adapter, which may change when a run goes on.
        confidence_floor: on a CPU a greedy draft ends where the product of its confidences falls
            below this. A preference, too; 0 drafts to the end.
        anchors_per_sequence: draft passes trained per sequence and step; they share one clean
            context.
        decay: the loss of slot j weighs exp(-(j - 1) / decay).
        distillation: weight of the KL divergence from the target's distribution; the
            cross-entropy with its tokens has the rest.
        init_from: adapter folder to begin with instead of nothing; it must have the shape that the
            fields above ask for, and its vocabulary is kept.
        keep_contexts: keep what the target computed of each sequence in memory (about 12 KiB per
            token of the default model) instead of computing it again.
    """

    num_draft_tokens: Positive = 8
    short_draft_tokens: Positive = 3
    short_share: _Share = 0.0
    entry_layer: _Count | None = None
    feature_layers: tuple[_Count, ...] | None = None
    rank: Positive = 32
    lora_alpha: Rate = 32.0
    targets: Annotated[tuple[_Target, ...], Field(min_length=1)] = get_args(_Target)
    train_norms: bool = True
    corruption: Literal["mask", "uniform"] = "mask"
    mask_token_id: _Count | None = None
    num_passes: Positive = 1
    sampler_size: _Count = 768
    draft_vocab_size: Positive | None = None
    preferred_draft_tokens: Positive | None = None
    confidence_floor: Annotated[float, Field(ge=0, lt=1)] = 0.0
    anchors_per_sequence: Positive = 32
    decay: Rate = 4.0
    distillation: _Share = 0.0
    init_from: Path | None = None
    keep_contexts: bool = False

    def layers(self, num_layers: int) -> tuple[int, tuple[int, ...]]:
        """Return the entry layer and the feature layers in a model of so many layers."""
        entry = self.entry_layer if self.entry_layer is not None else max(1, 2 * num_layers // 3)
        if self.feature_layers is not None:
            return entry, self.feature_layers
        if entry == 0:
            return entry, ()
        spread = {num_layers // 15, num_layers // 3, entry - 1, max(0, num_layers - 2)}
        return entry, tuple(sorted(spread))
