"""What recipes need that train beside a target on the native backbone: the target and its answers.

Next: hybrid/training/self_diffusion/recipe.py.
"""

from __future__ import annotations

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
    examples = read_examples(
        config.data,
        vocab_size=backbone.vocab_size,
        max_length=min(config.max_length, backbone.max_seq_len),
        tokenizer=loaded.tokenizer,
    )
    return loaded, backbone, examples
