"""From a checkpoint's config to a `ModelSpec`, by the table of families.

A config that the native backbone cannot represent is never approximated: `is_native` sends it to
the Hugging Face backbone. Next: hybrid/models/transformer.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid.errors import CheckpointError
from hybrid.models import config_fields
from hybrid.models.checkpoint import token_ids
from hybrid.models.family_table import FAMILIES, Family
from hybrid.models.rope import parse_rope
from hybrid.models.spec import ModelSpec, RopeSpec


def is_native(config: Mapping[str, Any]) -> bool:
    """Return whether the native backbone can represent this config exactly."""
    return why_not_native(config) is None


def why_not_native(config: Mapping[str, Any]) -> str | None:
    """Return what the native backbone lacks for this config, or None."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        return f"model_type {model_type!r}"
    family = FAMILIES[model_type]
    try:
        config = _translated(family, config)
        parse_rope(config, may_be_partial=family.has_partial_rope)
    except CheckpointError as error:
        return str(error)
    if config.get("hidden_act", "silu") != "silu":
        return f"hidden_act {config['hidden_act']!r}"
    kinds = set(config.get("layer_types") or ())
    if kinds - {"full_attention", "sliding_attention"}:
        return f"layer_types {sorted(kinds)}"
    if family.window != "layers" and "layer_types" in config and len(kinds) > 1:
        return f"layer_types in {model_type!r}"
    if family.window == "none" and config.get("sliding_window") is not None:
        return f"sliding_window in {model_type!r}"
    if family.window == "never" and any(config_fields.sliding_windows(config, family.window)):
        return f"use_sliding_window in {model_type!r}"
    return None


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Translate a checkpoint's config.

    Args:
        config: contents of config.json, under the family's own names or transformers' (4 or 5).

    Raises:
        CheckpointError: a field is missing or invalid, or the config is not native.
    """
    reason = why_not_native(config)
    if reason is not None:
        raise CheckpointError(
            f"The native backbone cannot run this model ({reason}). "
            f"Its families: {', '.join(FAMILIES)}. Load it with the Hugging Face backbone."
        )
    name = config["model_type"]
    family = FAMILIES[name]
    config = _translated(family, config)
    num_heads = config_fields.count(config, "num_attention_heads")
    num_kv_heads = config_fields.count(config, "num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"num_key_value_heads: got {num_kv_heads}, expected a divisor of {num_heads} heads."
        )
    attention_bias = bool(config.get("attention_bias", False))
    rope = parse_rope(config, may_be_partial=family.has_partial_rope)
    return ModelSpec(
        family=name,
        vocab_size=config_fields.count(config, "vocab_size"),
        hidden_size=config_fields.count(config, "hidden_size"),
        intermediate_size=config_fields.count(config, "intermediate_size"),
        num_layers=config_fields.count(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=config_fields.head_dim(config, num_heads),
        norm_eps=config_fields.norm_eps(config),
        max_seq_len=_context_window(config, rope),
        rope=rope,
        sliding_windows=config_fields.sliding_windows(config, family.window),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qk_norm=bool(config.get("qk_norm")) if family.qk_norm is None else family.qk_norm,
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=family.has_mlp_bias and bool(config.get("mlp_bias", False)),
        moe=None if family.moe is None else family.moe(config),
        eos_token_ids=token_ids(_special_token(config, "eos_token_id", family.eos_token_id)),
        mask_token_id=_mask_token(config, family),
        context=family.context,
        can_verify=family.can_verify,
        block_size=_block_size(config, family),
        logit_shift=_logit_shift(config, family),
        default_strategy=family.default_strategy,
    )


def _translated(family: Family, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config under transformers' names, with the family's defaults."""
    return family.translate({**family.defaults, **config})


def _context_window(config: Mapping[str, Any], rope: RopeSpec) -> int:
    context = config_fields.count(config, "max_position_embeddings")
    if rope.kind == "dynamic":
        return int(context * rope.params["factor"])
    if rope.kind == "yarn":
        # Some configs give the context after scaling, some before.
        original = rope.params.get("original_max_position_embeddings", context)
        return max(context, int(original * rope.params["factor"]))
    return context


def _special_token(config: Mapping[str, Any], key: str, default: int | None) -> Any:
    """Return the config's token, else the family's where the vocabulary has it."""
    value = config.get(key)
    is_known = default is not None and default < config_fields.count(config, "vocab_size")
    return default if value is None and is_known else value


def _mask_token(config: Mapping[str, Any], family: Family) -> int | None:
    value = _special_token(config, "mask_token_id", family.mask_token_id)
    vocab_size = config_fields.count(config, "vocab_size")
    if value is not None and not (type(value) is int and 0 <= value < vocab_size):
        raise CheckpointError(f"mask_token_id: got {value!r}, expected an id below {vocab_size}.")
    return value


def _block_size(config: Mapping[str, Any], family: Family) -> int | None:
    """Return the config's block size; without a mask token the field means something else."""
    has_masks = family.block_size is not None or config.get("mask_token_id") is not None
    if not has_masks or config.get(family.block_size_key) is None:
        return family.block_size
    return config_fields.count(config, family.block_size_key)


def _logit_shift(config: Mapping[str, Any], family: Family) -> int:
    value: int = config.get("logit_shift", family.logit_shift)
    if value not in {0, 1}:
        raise CheckpointError(f"logit_shift: got {value!r}, expected 0 or 1.")
    return value
