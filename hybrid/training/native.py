"""What recipes need that train beside a target on the native backbone: the target and its answers.

Next: hybrid/training/self_diffusion/recipe.py.
"""

from __future__ import annotations

import torch

from hybrid.errors import ConfigError
from hybrid.models.loading import LoadedModel, load_model
from hybrid.models.transformer import NativeBackbone
from hybrid.training.config import TrainConfig
from hybrid.training.data import Example, read_examples


def load_native(config: TrainConfig) -> tuple[LoadedModel, NativeBackbone, list[Example]]:
    """Load the target in the precision that is trained in, and read the data for it.

    Raises:
        ConfigError: bad data, or a model that the native backbone does not run.
        CheckpointError: the target cannot be read.
    """
    dtype = "bfloat16" if config.precision == "bf16" else "float32"
    loaded = load_model(config.model, device=config.device, dtype=dtype, trainable=True)
    backbone = loaded.backbone
    if not isinstance(backbone, NativeBackbone):
        raise ConfigError(
            f"model: {config.model} runs on the Hugging Face backbone, expected a native family "
            "(`hybrid list`)."
        )
    if problem := _problem(backbone):
        raise ConfigError(f"model: {config.model} {problem}.")
    examples = read_examples(
        config.data,
        vocab_size=backbone.vocab_size,
        max_length=min(config.max_length, backbone.max_seq_len),
        tokenizer=loaded.tokenizer,
    )
    return loaded, backbone, examples


def _problem(backbone: NativeBackbone) -> str | None:
    """Return what the draft passes of the recipes do not compute, None if they compute it all."""
    spec = backbone.spec
    if not spec.can_verify:
        return "is not autoregressive, expected a model that can verify what is drafted for it"
    if spec.rope.fraction != 1 or backbone.rope.query_scale(torch.zeros(1, 1)) is not None:
        return "rotates parts of heads or scales queries, which draft training does not do yet"
    if spec.moe is not None:
        return "has experts, which draft training does not know yet"
    return None
