"""What a family's config says: what its weights can do, its special tokens, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from diffusion_checkpoints import CONFIGS, EOS, MASK, tiny_diffusion
from safetensors.torch import load_file
from transformers import Ministral3Config

from hybrid.errors import CheckpointError
from hybrid.models.families import is_native, spec_from_config, why_not_native
from hybrid.models.family_table import FAMILIES
from hybrid.models.hf import HFBackbone
from hybrid.models.loading import load_model
from hybrid.models.transformer import NativeBackbone
from hybrid.types import Context

# ---- what the weights can do


CAPABILITIES = {
    "llada": (Context.BIDIRECTIONAL, False, None, 0, "llada"),
    "dream": (Context.BIDIRECTIONAL, False, None, 1, "dream"),
    "fast-dllm": (Context.BLOCK_CAUSAL, False, 8, 1, "fast-dllm-v2"),
    "sdar": (Context.BLOCK_CAUSAL, False, 4, 0, "sdar"),
    "sdar-moe": (Context.BLOCK_CAUSAL, False, 4, 0, "sdar"),
    "llada2": (Context.BLOCK_CAUSAL, False, 32, 0, "llada2"),
    "nemotron": (Context.CAUSAL, True, 32, 0, "speculative"),
    "wedlm-qwen2": (Context.CAUSAL, True, None, 0, "wedlm"),
    "wedlm-qwen3": (Context.CAUSAL, True, None, 0, "wedlm"),
    "a2d-llama": (Context.BIDIRECTIONAL, False, None, 0, "llada"),
    "a2d-qwen2": (Context.BIDIRECTIONAL, False, None, 0, "llada"),
    "a2d-qwen3": (Context.BIDIRECTIONAL, False, None, 0, "llada"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_capabilities(case: str, tmp_path: Path) -> None:
    backbone = load_model(tiny_diffusion(tmp_path, case), device="cpu", trainable=True).backbone
    assert isinstance(backbone, NativeBackbone)
    assert (
        backbone.context,
        backbone.can_verify,
        backbone.block_size,
        backbone.logit_shift,
        backbone.default_strategy,
    ) == CAPABILITIES[case]
    assert (backbone.mask_token_id, backbone.eos_token_ids) == (MASK, (EOS,))
    expected = sum(
        t.nbytes for t in load_file(tmp_path / "model.safetensors").values() if t.ndim > 1
    )
    assert backbone.weight_nbytes == expected


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "ministral3"])
def test_autoregressive_families_verify(family: str) -> None:
    found = FAMILIES[family]
    assert (found.context, found.can_verify, found.block_size) == (Context.CAUSAL, True, None)
    assert found.default_strategy == "speculative"


def test_models_of_transformers_own_classes_verify() -> None:
    found = HFBackbone
    assert (found.context, found.can_verify, found.block_size) == (Context.CAUSAL, True, None)
    assert found.default_strategy == "speculative"


@pytest.mark.parametrize(
    ("case", "mask", "eos"),
    [
        ("llada", 126336, 126081),
        ("dream", 151666, 151643),
        ("fast-dllm", 151665, 151645),
        ("sdar", 151669, 151643),
        ("sdar-moe", 151669, 151643),
        ("llada2", 156895, 156892),
        ("nemotron", 100, 2),
    ],
)
def test_special_tokens_default_to_the_familys_where_the_vocabulary_has_them(
    case: str, mask: int, eos: int
) -> None:
    own = {k: v for k, v in CONFIGS[case].items() if k not in {"mask_token_id", "eos_token_id"}}
    size = "embedding_size" if case == "llada" else "vocab_size"
    spec = spec_from_config({**own, size: mask + 1})
    assert (spec.mask_token_id, spec.eos_token_ids) == (mask, (eos,))
    small = spec_from_config({**own, size: min(mask, eos)})
    assert small.mask_token_id is None
    null = spec_from_config({**own, size: mask + 1, "mask_token_id": None, "eos_token_id": None})
    assert null.mask_token_id == mask
    given = spec_from_config({**CONFIGS[case], size: mask + 1})
    assert (given.mask_token_id, given.eos_token_ids) == (MASK, (EOS,))


@pytest.mark.parametrize("value", [48, -1, "40", True, 1.0])
def test_an_impossible_mask_token_is_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match="mask_token_id: got .* expected an id below 48"):
        spec_from_config({**CONFIGS["dream"], "mask_token_id": value})


def test_ministral_defaults_are_those_of_transformers() -> None:
    ours = {"model_type": "ministral3", "vocab_size": 9, "hidden_size": 64}
    spec = spec_from_config(
        {**ours, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 32}
    )
    want = Ministral3Config()
    assert (spec.head_dim, spec.num_kv_heads) == (want.head_dim, want.num_key_value_heads)
    assert (spec.norm_eps, spec.max_seq_len) == (want.rms_norm_eps, want.max_position_embeddings)
    rope = {**spec.rope.params, "rope_theta": spec.rope.theta, "rope_type": spec.rope.kind}
    same = {"rope_theta", "rope_type", "factor", "original_max_position_embeddings"}
    same |= {"mscale", "mscale_all_dim", "llama_4_scaling_beta"}
    assert {k: rope[k] for k in same} == {k: want.rope_parameters[k] for k in same}


def test_what_a_model_was_trained_with_is_in_its_config() -> None:
    """`hybrid train joint` writes these beside the fields of the base model."""
    config = {**CONFIGS["a2d-qwen3"], "model_type": "qwen3", "block_size": 16, "logit_shift": 0}
    spec = spec_from_config(config)
    assert (spec.block_size, spec.logit_shift, spec.can_verify) == (16, 0, True)
    other = spec_from_config({**config, "mask_token_id": None, "logit_shift": 1})
    assert (other.block_size, other.logit_shift) == (None, 1)
    with pytest.raises(CheckpointError, match="logit_shift: got 2, expected 0 or 1"):
        spec_from_config({**config, "logit_shift": 2})


# ---- what is refused


@pytest.mark.parametrize(
    ("case", "fields", "reason"),
    [
        ("llada", {"alibi": True}, "alibi: got True, expected False"),
        ("llada", {"rope": False}, "rope: got False"),
        ("llada", {"block_type": "sequential"}, "block_type: got 'sequential'"),
        ("llada", {"layer_norm_type": "default"}, "layer_norm_type: got 'default'"),
        ("llada", {"activation_type": "swiglu"}, "activation_type"),
        ("llada", {"attention_layer_norm": True}, "attention_layer_norm"),
        ("llada", {"include_bias": True}, "include_bias"),
        ("llada", {"bias_for_layer_norm": True}, "bias_for_layer_norm"),
        ("llada", {"scale_logits": True}, "scale_logits"),
        ("llada", {"input_emb_norm": True}, "input_emb_norm"),
        ("llada", {"block_group_size": 2}, "block_group_size"),
        ("llada", {"clip_qkv": 8.0}, "clip_qkv"),
        ("llada", {"d_model": None}, "no 'd_model'"),
        ("llada2", {"score_function": "softmax"}, "score_function: got 'softmax'"),
        ("llada2", {"use_bias": True}, "use_bias"),
        ("llada2", {"rotary_dim": 6}, "rotary_dim: got 6, expected 4"),
        ("llada2", {"partial_rotary_factor": 1.5}, "partial_rotary_factor: got 1.5"),
        ("dream", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5, expected 1"),
        ("dream", {"use_sliding_window": True, "max_window_layers": 1}, "use_sliding_window"),
        ("sdar", {"use_sliding_window": True, "max_window_layers": 0}, "use_sliding_window"),
        ("nemotron", {"sliding_window": 8}, "sliding_window"),
        ("wedlm-qwen2", {"hidden_act": "gelu"}, "gelu"),
    ],
)
def test_what_it_cannot_represent_is_refused(
    case: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config = {**CONFIGS[case], **fields}
    assert not is_native(config)
    assert reason in str(why_not_native(config))
    path = tiny_diffusion(tmp_path, case)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match="Nor does the native backbone run it") as error:
        load_model(path, device="cpu")
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_group": 3}, "n_group: got 3, expected a divisor of 8"),
        ({"n_group": 8, "topk_group": 4}, "n_group: got 8"),
        ({"topk_group": 5}, "topk_group: got 5, expected at most 4"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok: got 5, expected at most 4"),
        ({"num_experts": None}, "no 'num_experts'"),
    ],
)
def test_impossible_experts_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec_from_config({**CONFIGS["llada2"], **fields})


def test_an_unknown_model_type_names_the_supported_ones(tmp_path: Path) -> None:
    path = tiny_diffusion(tmp_path, "dream", model_type="nightmare")
    with pytest.raises(CheckpointError, match="nightmare") as error:
        load_model(path, device="cpu")
    assert all(family in str(error.value) for family in FAMILIES)


@pytest.mark.parametrize(
    ("fields", "check"),
    [
        ({"n_kv_heads": None}, lambda spec: spec.num_kv_heads == 4),
        ({"n_kv_heads": None, "multi_query_attention": True}, lambda spec: spec.num_kv_heads == 1),
        ({"mlp_hidden_size": None, "mlp_ratio": 3}, lambda spec: spec.intermediate_size == 96),
        ({"embedding_size": None}, lambda spec: spec.vocab_size == 44),
        ({"weight_tying": True}, lambda spec: spec.tie_embeddings),
        ({"include_qkv_bias": True}, lambda spec: spec.qkv_bias and not spec.o_bias),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_llada_fields(fields: dict[str, Any], check: Any) -> None:
    assert check(spec_from_config({**CONFIGS["llada"], **fields}))
    assert not spec_from_config(CONFIGS["llada"]).tie_embeddings
