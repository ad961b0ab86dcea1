"""Configuration of the dflash recipe. Next: hybrid/training/dflash/recipe.py."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hybrid.training.config import Positive, Rate, TrainConfig

_Index = Annotated[int, Field(ge=0)]


class DFlashConfig(TrainConfig):
    """How a DFlash drafter is trained; the fields of `TrainConfig`, and these.

    Attributes:
        num_draft_layers: layers of the drafter.
        block_size: the anchor and the masks behind it; block_size - 1 tokens are drafted.
        target_layer_ids: layers of the target whose outputs are the features, never the last one;
            None spreads as many as the drafter has layers evenly from 1 to n - 3.
        intermediate_size: inner width of the drafter's MLP; None is the target's.
        num_heads: H of the drafter; None is the target's.
        num_kv_heads: G of the drafter; None is the target's.
        head_dim: D of the drafter; None is the target's.
        mask_token_id: id of the target's embedding that stands for a masked position; None takes
            one that no text uses.
        init: "target" starts each layer as one of the target's last, where the shapes agree, and
            the features as the last of them; "random" starts from noise.
        anchors_per_sequence: blocks trained per sequence and step; they share one clean pass of
            the target.
        decay: the loss of the j-th mask weighs exp(-(j - 1) / decay).
        distillation: weight of the KL divergence from the target's distribution; the
            cross-entropy with its tokens has the rest.
        export_dtype: of the weights on disk.
    """

    num_draft_layers: Positive = 5
    block_size: Annotated[int, Field(ge=2)] = 8
    target_layer_ids: Annotated[tuple[_Index, ...], Field(min_length=1)] | None = None
    intermediate_size: Positive | None = None
    num_heads: Positive | None = None
    num_kv_heads: Positive | None = None
    head_dim: Annotated[int, Field(ge=2, multiple_of=2)] | None = None
    mask_token_id: _Index | None = None
    init: Literal["target", "random"] = "target"
    anchors_per_sequence: Positive = 32
    decay: Rate = 4.0
    distillation: Annotated[float, Field(ge=0, le=1)] = 0.0
    export_dtype: Literal["bfloat16", "float32"] = "bfloat16"
