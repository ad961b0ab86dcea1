"""Configuration of training runs. Next: hybrid/training/recipe.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from hybrid.config import Config

Positive = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class TrainConfig(Config):
    """What every recipe needs to know.

    Attributes:
        data: JSONL with `p` (prompt ids) and `r` (response ids of the target itself), or `prompt`
            and `response` texts.
        output: folder of the run: checkpoints, metrics, and the result at the end.
        model: the target, as `HybridDecoder.from_pretrained` takes it.
        steps: optimiser steps; the learning rate falls linearly to 0 over them.
        warmup_steps: of the learning rate.
        learning_rate: peak.
        weight_decay: of AdamW.
        sequences_per_step: micro-batches whose gradients make one optimiser step, over all
            processes; must be a multiple of their number.
        clip: gradient norm.
        max_length: longer sequences are refused.
        num_eval_sequences: taken from the end of the data, never trained on.
        eval_every: steps between held-out evaluations and checkpoints.
        precision: "bf16" computes under autocast, parameters stay float32; "float32" does not.
        tensorboard: also write event files below `output`.
        seed: order of sequences, random draws, initial weights.
        device: where to train; "auto" takes CUDA where there is any.
    """

    data: Path
    output: Path
    model: str = "default"
    steps: Positive = 6000
    warmup_steps: Positive = 50
    learning_rate: Rate = 1e-3
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    sequences_per_step: Positive = 1
    clip: Rate = 1.0
    max_length: Positive = 1024
    num_eval_sequences: Positive = 32
    eval_every: Positive = 250
    precision: Literal["bf16", "float32"] = "bf16"
    tensorboard: bool = False
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    device: str = "auto"
