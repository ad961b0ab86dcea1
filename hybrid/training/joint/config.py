"""Configuration of the joint recipe. Next: hybrid/training/joint/recipe.py."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hybrid.training.config import Positive, Rate, TrainConfig


class JointConfig(TrainConfig):
    """How a model is fine-tuned to be autoregressive and diffusion at once.

    The fields of `TrainConfig`, and these.

    Attributes:
        learning_rate: peak; low-rank updates bear a hundred times more than a full fine-tune.
        alpha: weight of the diffusion loss; the autoregressive loss weighs 1.
        block_size: positions that one diffusion pass fills, the anchor included.
        mask_token_id: None takes one as `choose_mask_token` says; the result names it.
        rank: r of low-rank updates; None trains all weights.
        lora_alpha: scale of the updates is lora_alpha / rank.
        targets: linear layers with updates ("q_proj", ...); none is all of them but the head.
        train_on: "response" learns the responses alone, with blocks counted from the prompt's end;
            "all" learns prompts too, with blocks counted from the first token.
        noise: one share of masked tokens per "block" or per "sequence".
        min_noise: shares are drawn evenly from min_noise to 1.
        complementary: also run each sequence with exactly the other tokens masked.
        merge: export a checkpoint with the updates in its weights, not a PEFT adapter.
        export_dtype: of the exported weights.
    """

    learning_rate: Rate = 1e-5
    alpha: Rate = 0.3
    block_size: Annotated[int, Field(ge=2)] = 32
    mask_token_id: Annotated[int, Field(ge=0)] | None = None
    rank: Positive | None = None
    lora_alpha: Rate = 32.0
    targets: tuple[str, ...] = ()
    train_on: Literal["response", "all"] = "response"
    noise: Literal["block", "sequence"] = "block"
    min_noise: Annotated[float, Field(gt=0, lt=0.5)] = 1e-3
    complementary: bool = False
    merge: bool = True
    export_dtype: Literal["bfloat16", "float32"] = "bfloat16"
