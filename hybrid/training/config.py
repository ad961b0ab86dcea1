"""Configuration of the self-diffusion recipe. Next: hybrid/training/trainer.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from hybrid.config import Config

_Positive = Annotated[int, Field(ge=1)]
_Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class SelfDiffusionConfig(Config):
    """How a diffusion adapter is trained.

    Attributes:
        data: JSONL with `p` (prompt ids) and `r` (response ids of the target itself), or `prompt`
            and `response` texts.
        output: folder of the run: checkpoints, metrics, and the adapter at the end.
        model: the target, as `HybridDecoder.from_pretrained` takes it.
        num_draft_tokens: K masked slots behind the anchor.
        entry_layer: first layer of the draft pass.
        feature_layers: layers whose output at the anchor's predecessor enters the draft input.
        rank: r of the low-rank updates.
        lora_alpha: scale of the updates is lora_alpha / rank.
        steps: optimiser steps; the learning rate falls linearly to 0 over them.
        warmup_steps: of the learning rate.
        learning_rate: peak.
        anchors_per_sequence: draft passes trained per sequence and step; they share one clean
            context.
        sequences_per_step: gradient of this many sequences per optimiser step.
        decay: the loss of slot j weighs exp(-(j - 1) / decay).
        clip: gradient norm.
        max_length: longer sequences are refused.
        num_eval_sequences: taken from the end of the data, never trained on.
        eval_every: steps between held-out evaluations and checkpoints.
        keep_contexts: keep what the target computed of each sequence in memory (about 12 KiB per
            token of the default model) instead of computing it again.
        seed: order of sequences, anchors, initial weights.
        device: where to train; "auto" takes CUDA where there is any.
    """

    data: Path
    output: Path
    model: str = "default"
    num_draft_tokens: _Positive = 8
    entry_layer: _Positive = 20
    feature_layers: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)] = (
        2,
        10,
        19,
        28,
    )
    rank: _Positive = 32
    lora_alpha: _Rate = 32.0
    steps: _Positive = 6000
    warmup_steps: _Positive = 50
    learning_rate: _Rate = 1e-3
    anchors_per_sequence: _Positive = 32
    sequences_per_step: _Positive = 1
    decay: _Rate = 4.0
    clip: _Rate = 1.0
    max_length: _Positive = 1024
    num_eval_sequences: _Positive = 32
    eval_every: _Positive = 250
    keep_contexts: bool = False
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    device: str = "auto"
