"""Fields of a checkpoint's config: checked numbers, and families that name things their own way.

Everything that is refused here is refused because the native backbone would compute something else.
Next: hybrid/models/family_table.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid.errors import CheckpointError, did_you_mean
from hybrid.models.spec import MoeSpec

ConfigFields = Mapping[str, Any]


def count(config: ConfigFields, key: str, default: int | None = None) -> int:
    """Return a whole number of at least 1; `default` stands for a missing or null one.

    Raises:
        CheckpointError: it is something else, or missing without a default.
    """
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"config.json has no {key!r}.{did_you_mean(key, config)}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{key}: got {value!r}, expected a whole number of at least 1.")
    return value


def head_dim(config: ConfigFields, num_heads: int) -> int:
    """Return the width of a head, an even number.

    Raises:
        CheckpointError: it is odd, or the heads do not divide the hidden size.
    """
    hidden_size = count(config, "hidden_size")
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise CheckpointError(
            f"hidden_size: got {hidden_size}, expected a multiple of {num_heads} heads."
        )
    size = count(config, "head_dim", default=hidden_size // num_heads)
    if size % 2:
        raise CheckpointError(f"head_dim: got {size}, expected an even number for RoPE.")
    return size


def norm_eps(config: ConfigFields) -> float:
    """Return `rms_norm_eps`.

    Raises:
        CheckpointError: it is no number from 0 to 1.
    """
    value = config.get("rms_norm_eps", 1e-6)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise CheckpointError(f"rms_norm_eps: got {value!r}, expected a number from 0 to 1.")
    return float(value)


def sliding_windows(config: ConfigFields, kind: str) -> tuple[int | None, ...]:
    """Return each layer's window or None; `kind` as in `Family.window`.

    Raises:
        CheckpointError: `layer_types` is not one for each layer, or the window is no size.
    """
    num_layers = count(config, "num_hidden_layers")
    if kind == "none" or config.get("sliding_window") is None:
        slides = [False] * num_layers
    elif kind == "all":
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
    return tuple(count(config, "sliding_window") if slide else None for slide in slides)


# ---- LLaDA: OLMo's names


# A missing key has this value, any other value is refused.
_LLADA: ConfigFields = {
    "block_type": "llama",
    "layer_norm_type": "rms",
    "activation_type": "silu",
    "rope": True,
    "alibi": False,
    "attention_layer_norm": False,
    "layer_norm_with_affine": True,
    "bias_for_layer_norm": False,
    "include_bias": False,
    "input_emb_norm": False,
    "scale_logits": False,
    "block_group_size": 1,
    "clip_qkv": None,
}
_LLADA_NAMES: Mapping[str, str] = {
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "mlp_hidden_size": "intermediate_size",
    "max_sequence_length": "max_position_embeddings",
    "embedding_size": "vocab_size",
    "include_qkv_bias": "attention_bias",
}


def llada(config: ConfigFields) -> ConfigFields:
    """Translate a LLaDA config.

    Raises:
        CheckpointError: it asks for something else than a Llama block.
    """
    _require(config, _LLADA)
    for key in ("d_model", "n_layers", "n_heads", "max_sequence_length"):
        count(config, key)
    # `tie_word_embeddings` is true in checkpoints that do have a head of their own.
    translated = {**config, "tie_word_embeddings": config.get("weight_tying", False)}
    for theirs, ours in _LLADA_NAMES.items():
        if config.get(theirs) is not None:
            translated[ours] = config[theirs]
    if config.get("mlp_hidden_size") is None:
        translated["intermediate_size"] = config.get("mlp_ratio", 4) * config["d_model"]
    if config.get("n_kv_heads") is None and config.get("multi_query_attention"):
        translated["num_key_value_heads"] = 1
    return translated


# ---- LLaDA2: mixture of experts with its own names for flags


_LLADA2: ConfigFields = {
    "use_bias": False,
    "use_rmsnorm": True,
    "norm_head": False,
    "norm_softmax": False,
    "score_function": "sigmoid",
}


def llada2(config: ConfigFields) -> ConfigFields:
    """Translate a LLaDA2 config.

    Raises:
        CheckpointError: it asks for biases, norms or a router that no released model has.
    """
    _require(config, _LLADA2)
    num_heads = count(config, "num_attention_heads")
    rotated = int(head_dim(config, num_heads) * config["partial_rotary_factor"])
    if config.get("rotary_dim", rotated) not in {None, rotated}:
        raise CheckpointError(
            f"rotary_dim: got {config['rotary_dim']}, expected {rotated} by partial_rotary_factor."
        )
    flags = {"attention_bias": "use_qkv_bias", "qk_norm": "use_qk_norm"}
    return {**config, **{ours: config.get(theirs) for ours, theirs in flags.items()}}


def llada2_moe(config: ConfigFields) -> MoeSpec:
    """Return the experts of a LLaDA2 config.

    Raises:
        CheckpointError: a number is missing or impossible.
    """
    num_layers, num_experts = count(config, "num_hidden_layers"), count(config, "num_experts")
    num_groups = count(config, "n_group", default=1)
    first = config.get("first_k_dense_replace") or 0
    num_chosen, size = count(config, "num_experts_per_tok"), count(config, "moe_intermediate_size")
    return _checked(
        MoeSpec(
            layers=tuple(layer >= first for layer in range(num_layers)),
            num_experts=num_experts,
            num_chosen=num_chosen,
            intermediate_size=size,
            shared_size=size * (config.get("num_shared_experts") or 0),
            scoring="sigmoid",
            has_bias=bool(config.get("moe_router_enable_expert_bias", True)),
            num_groups=num_groups,
            num_chosen_groups=count(config, "topk_group", default=num_groups),
            normalize=bool(config.get("norm_topk_prob", True)) and num_chosen > 1,
            scale=float(config.get("routed_scaling_factor") or 1.0),
        )
    )


# ---- Qwen3-MoE


def qwen3_moe(config: ConfigFields) -> MoeSpec:
    """Return the experts of a config with the fields of Qwen3-MoE.

    Raises:
        CheckpointError: a number is missing or impossible.
    """
    step, dense = count(config, "decoder_sparse_step", default=1), config.get("mlp_only_layers")
    num_layers = count(config, "num_hidden_layers")
    return _checked(
        MoeSpec(
            layers=tuple(
                (layer + 1) % step == 0 and layer not in (dense or ())
                for layer in range(num_layers)
            ),
            num_experts=count(config, "num_experts"),
            num_chosen=count(config, "num_experts_per_tok"),
            intermediate_size=count(config, "moe_intermediate_size"),
            normalize=bool(config.get("norm_topk_prob", False)),
        )
    )


def _checked(moe: MoeSpec) -> MoeSpec:
    per_group, left_over = divmod(moe.num_experts, moe.num_groups)
    # A group is judged by its two best experts.
    if left_over or (moe.num_groups > 1 and per_group < 2):
        raise CheckpointError(
            f"n_group: got {moe.num_groups}, expected a divisor of {moe.num_experts} experts that "
            "leaves at least 2 in a group."
        )
    if moe.num_chosen_groups > moe.num_groups:
        raise CheckpointError(
            f"topk_group: got {moe.num_chosen_groups}, expected at most {moe.num_groups}."
        )
    available = moe.num_chosen_groups * per_group
    if moe.num_chosen > available:
        raise CheckpointError(
            f"num_experts_per_tok: got {moe.num_chosen}, expected at most {available}."
        )
    return moe


def _require(config: ConfigFields, expected: ConfigFields) -> None:
    for key, value in expected.items():
        if config.get(key, value) != value:
            raise CheckpointError(f"{key}: got {config[key]!r}, expected {value!r}.")
