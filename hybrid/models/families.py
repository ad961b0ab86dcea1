"""Model families: how a checkpoint's config becomes a `ModelSpec`.

The four families here name their weights alike (`model.layers.N.self_attn.q_proj.weight`), so
there is no name map yet. A config that the native backbone cannot represent is never
approximated: `is_native` sends it to the Hugging Face backbone. Next: hybrid/models/transformer.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from hybrid.errors import CheckpointError, did_you_mean
from hybrid.models.checkpoint import token_ids
from hybrid.models.rope import parse_rope
from hybrid.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Family:
    """What one `model_type` means beyond its config file.

    Attributes:
        defaults: values of keys that the config leaves out, as transformers' class has them.
        qkv_bias: q, k, v have biases; None means the config's `attention_bias` says so.
        o_bias: the attention output has one; None as above.
        has_mlp_bias: the config's `mlp_bias` counts.
        qk_norm: q and k are normalised per head.
        window: which layers slide: "none", "all", or "layers" (`use_sliding_window` and friends).
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool | None = False
    o_bias: bool | None = False
    has_mlp_bias: bool = False
    qk_norm: bool = False
    window: str = "none"


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(
            {"max_position_embeddings": 2048, "eos_token_id": 2},
            qkv_bias=None,
            o_bias=None,
            has_mlp_bias=True,
        ),
        "qwen2": Family(
            {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096},
            qkv_bias=True,
            window="layers",
        ),
        "qwen3": Family(
            {
                "num_key_value_heads": 32,
                "head_dim": 128,
                "max_position_embeddings": 32768,
                "sliding_window": 4096,
            },
            qkv_bias=None,
            o_bias=None,
            qk_norm=True,
            window="layers",
        ),
        "mistral": Family(
            {
                "num_key_value_heads": 8,
                "max_position_embeddings": 131072,
                "sliding_window": 4096,
                "eos_token_id": 2,
            },
            window="all",
        ),
    }
)


def is_native(config: Mapping[str, Any]) -> bool:
    """Return whether the native backbone can represent this config exactly."""
    return why_not_native(config) is None


def why_not_native(config: Mapping[str, Any]) -> str | None:
    """Return what the native backbone lacks for this config, or None."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        return f"model_type {model_type!r}"
    family = FAMILIES[model_type]
    if config.get("hidden_act", "silu") != "silu":
        return f"hidden_act {config['hidden_act']!r}"
    kinds = set(config.get("layer_types") or ())
    if kinds - {"full_attention", "sliding_attention"}:
        return f"layer_types {sorted(kinds)}"
    if family.window != "layers" and "layer_types" in config and len(kinds) > 1:
        return f"layer_types in {model_type!r}"
    if family.window == "none" and config.get("sliding_window") is not None:
        return f"sliding_window in {model_type!r}"
    try:
        parse_rope({**family.defaults, **config})
    except CheckpointError as error:
        return str(error)
    return None


def spec_from_config(config: Mapping[str, Any]) -> ModelSpec:
    """Translate a checkpoint's config.

    Args:
        config: contents of config.json, under transformers' names (4 or 5).

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
    config = {**family.defaults, **config}
    num_heads = _count(config, "num_attention_heads")
    num_kv_heads = _count(config, "num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"num_key_value_heads: got {num_kv_heads}, expected a divisor of {num_heads} heads."
        )
    attention_bias = bool(config.get("attention_bias", False))
    rope, context = parse_rope(config), _count(config, "max_position_embeddings")
    if rope.kind == "dynamic":
        context = int(context * rope.params["factor"])
    elif rope.kind == "yarn":
        # Some configs give the context after scaling, some before.
        original = rope.params.get("original_max_position_embeddings", context)
        context = max(context, int(original * rope.params["factor"]))
    return ModelSpec(
        family=name,
        vocab_size=_count(config, "vocab_size"),
        hidden_size=_count(config, "hidden_size"),
        intermediate_size=_count(config, "intermediate_size"),
        num_layers=_count(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(config, num_heads),
        norm_eps=_norm_eps(config),
        max_seq_len=context,
        rope=rope,
        sliding_windows=_sliding_windows(config, family),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qk_norm=family.qk_norm,
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=family.has_mlp_bias and bool(config.get("mlp_bias", False)),
        eos_token_ids=token_ids(config.get("eos_token_id")),
        mask_token_id=config.get("mask_token_id"),
    )


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"config.json has no {key!r}.{did_you_mean(key, config)}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{key}: got {value!r}, expected a whole number of at least 1.")
    return value


def _head_dim(config: Mapping[str, Any], num_heads: int) -> int:
    hidden_size = _count(config, "hidden_size")
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise CheckpointError(
            f"hidden_size: got {hidden_size}, expected a multiple of {num_heads} heads."
        )
    head_dim = _count(config, "head_dim", default=hidden_size // num_heads)
    if head_dim % 2:
        raise CheckpointError(f"head_dim: got {head_dim}, expected an even number for RoPE.")
    return head_dim


def _norm_eps(config: Mapping[str, Any]) -> float:
    value = config.get("rms_norm_eps", 1e-6)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise CheckpointError(f"rms_norm_eps: got {value!r}, expected a number from 0 to 1.")
    return float(value)


def _sliding_windows(config: Mapping[str, Any], family: Family) -> tuple[int | None, ...]:
    num_layers = _count(config, "num_hidden_layers")
    if family.window == "none" or config.get("sliding_window") is None:
        slides = [False] * num_layers
    elif family.window == "all":
        slides = [True] * num_layers
    elif not config.get("use_sliding_window", False):
        slides = [False] * num_layers
    elif config.get("layer_types") is not None:
        slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    else:
        first = config.get("max_window_layers", 28)
        slides = [layer >= first for layer in range(num_layers)]
    if len(slides) != num_layers:
        raise CheckpointError(
            f"layer_types: got {len(slides)} entries, expected one for each of {num_layers} layers."
        )
    return tuple(_count(config, "sliding_window") if slide else None for slide in slides)
