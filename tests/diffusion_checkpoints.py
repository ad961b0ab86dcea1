"""Random tiny checkpoints of the diffusion families, under each family's own names.

Written by hand from the formats, without the tables of hybrid/models; `diffusion_twin.py` reads
them back by the same names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

MASK, EOS = 40, 41

_QWEN: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "mask_token_id": MASK,
    "eos_token_id": EOS,
    "torch_dtype": "float32",
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llada": {
        "model_type": "llada",
        "d_model": 32,
        "n_heads": 4,
        "n_kv_heads": 2,
        "n_layers": 2,
        "mlp_hidden_size": 48,
        "embedding_size": 48,
        "vocab_size": 44,  # the embedding may have rows beyond the tokenizer's
        "max_sequence_length": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "block_type": "llama",
        "layer_norm_type": "rms",
        "activation_type": "silu",
        "rope": True,
        "alibi": False,
        "include_bias": False,
        "include_qkv_bias": False,
        "tie_word_embeddings": True,  # as in the released checkpoints, whose head is not tied
        "weight_tying": False,
        "mask_token_id": MASK,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    },
    "dream": {**_QWEN, "model_type": "Dream"},
    "fast-dllm": {**_QWEN, "model_type": "Fast_dLLM_Qwen", "bd_size": 8},
    "sdar": {**_QWEN, "model_type": "sdar", "block_size": 4, "attention_bias": False},
    "sdar-moe": {
        **_QWEN,
        "model_type": "sdar_moe",
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    },
    "llada2": {
        **_QWEN,
        "model_type": "llada2_moe",
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "num_shared_experts": 2,
        "moe_intermediate_size": 16,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
        "use_qkv_bias": False,
        "use_bias": False,
    },
    "nemotron": {
        **{k: v for k, v in _QWEN.items() if k not in {"rope_theta", "use_sliding_window"}},
        "model_type": "nemotron_labs_diffusion",
        "block_size": 32,
        "sliding_window": None,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _YARN,
    },
    "wedlm-qwen2": {**_QWEN, "model_type": "wedlm"},
    "wedlm-qwen3": {**_QWEN, "model_type": "wedlm", "qk_norm": True, "attention_bias": False},
    "a2d-llama": {
        **_QWEN,
        "model_type": "a2d-llama",
        "sliding_window": None,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "a2d-qwen2": {**_QWEN, "model_type": "a2d-qwen2", "tie_word_embeddings": True},
    "a2d-qwen3": {**_QWEN, "model_type": "a2d-qwen3"},
}

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def tiny_diffusion(folder: Path, case: str, *, seed: int = 0, **fields: Any) -> Path:
    """Write a random model of a case of `CONFIGS`; `fields` replace those of its config."""
    config = {**CONFIGS[case], **fields}
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in _shapes(config):
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            tensors[name] = 1.5 * noise / shape[1] ** 0.5
        else:
            tensors[name] = 0.2 * noise + (0 if "bias" in name else 1)  # biases, gains of norms
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _shapes(config: dict[str, Any]) -> Shapes:
    if config["model_type"] == "llada":
        return _llada(config)
    if config["model_type"] == "llada2_moe":
        return _llada2(config)
    return _qwen(config)


def _mlp(prefix: str, width: int, size: int) -> Shapes:
    yield f"{prefix}.gate_proj.weight", (size, width)
    yield f"{prefix}.up_proj.weight", (size, width)
    yield f"{prefix}.down_proj.weight", (width, size)


def _llada(c: dict[str, Any]) -> Shapes:
    width, size = c["d_model"], c["mlp_hidden_size"]
    groups = c["n_kv_heads"] * width // c["n_heads"]
    top = "model.transformer"
    yield f"{top}.wte.weight", (c["embedding_size"], width)
    yield f"{top}.ln_f.weight", (width,)
    yield f"{top}.ff_out.weight", (c["embedding_size"], width)
    for n in range(c["n_layers"]):
        block = f"{top}.blocks.{n}"
        yield f"{block}.attn_norm.weight", (width,)
        yield f"{block}.ff_norm.weight", (width,)
        for name, rows in (("q_proj", width), ("k_proj", groups), ("v_proj", groups)):
            yield f"{block}.{name}.weight", (rows, width)
            if c["include_qkv_bias"]:
                yield f"{block}.{name}.bias", (rows,)
        yield f"{block}.attn_out.weight", (width, width)
        yield f"{block}.ff_proj.weight", (size, width)
        yield f"{block}.up_proj.weight", (size, width)
        yield f"{block}.ff_out.weight", (width, size)


def _llada2(c: dict[str, Any]) -> Shapes:
    width, dim, size = c["hidden_size"], c["head_dim"], c["moe_intermediate_size"]
    heads, groups = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    yield "model.word_embeddings.weight", (c["vocab_size"], width)
    yield "model.norm.weight", (width,)
    yield "lm_head.weight", (c["vocab_size"], width)
    for n in range(c["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        yield f"{layer}.input_layernorm.weight", (width,)
        yield f"{layer}.post_attention_layernorm.weight", (width,)
        yield f"{layer}.attention.query_key_value.weight", (heads + 2 * groups, width)
        yield f"{layer}.attention.query_layernorm.weight", (dim,)
        yield f"{layer}.attention.key_layernorm.weight", (dim,)
        yield f"{layer}.attention.dense.weight", (width, heads)
        if n < c["first_k_dense_replace"]:
            yield from _mlp(f"{layer}.mlp", width, c["intermediate_size"])
            continue
        yield f"{layer}.mlp.gate.weight", (c["num_experts"], width)
        yield f"{layer}.mlp.gate.expert_bias", (c["num_experts"],)
        for expert in range(c["num_experts"]):
            yield from _mlp(f"{layer}.mlp.experts.{expert}", width, size)
        if c["num_shared_experts"]:
            yield from _mlp(f"{layer}.mlp.shared_experts", width, size * c["num_shared_experts"])


def _qwen(c: dict[str, Any]) -> Shapes:
    kind, width, dim = c["model_type"], c["hidden_size"], c["head_dim"]
    is_nemotron = kind == "nemotron_labs_diffusion"
    top, head = ("encoder", "diffusion_head") if is_nemotron else ("model", "lm_head")
    heads, groups = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    yield f"{top}.embed_tokens.weight", (c["vocab_size"], width)
    yield f"{top}.norm.weight", (width,)
    if not c["tie_word_embeddings"]:
        yield f"{head}.weight", (c["vocab_size"], width)
    qkv_bias = c.get("attention_bias", kind in {"Dream", "Fast_dLLM_Qwen", "a2d-qwen2", "wedlm"})
    for n in range(c["num_hidden_layers"]):
        layer = f"{top}.layers.{n}"
        yield f"{layer}.input_layernorm.weight", (width,)
        yield f"{layer}.post_attention_layernorm.weight", (width,)
        for name, rows in (("q_proj", heads), ("k_proj", groups), ("v_proj", groups)):
            yield f"{layer}.self_attn.{name}.weight", (rows, width)
            if qkv_bias:
                yield f"{layer}.self_attn.{name}.bias", (rows,)
        yield f"{layer}.self_attn.o_proj.weight", (width, heads)
        if kind == "a2d-llama":
            yield f"{layer}.self_attn.o_proj.bias", (width,)
            for name in ("gate_proj", "up_proj"):
                yield f"{layer}.mlp.{name}.bias", (c["intermediate_size"],)
            yield f"{layer}.mlp.down_proj.bias", (width,)
        if c.get("qk_norm", kind in {"sdar", "sdar_moe", "a2d-qwen3"}):
            yield f"{layer}.self_attn.q_norm.weight", (dim,)
            yield f"{layer}.self_attn.k_norm.weight", (dim,)
        if kind == "sdar_moe" and n not in c["mlp_only_layers"]:
            yield f"{layer}.mlp.gate.weight", (c["num_experts"], width)
            for expert in range(c["num_experts"]):
                yield from _mlp(f"{layer}.mlp.experts.{expert}", width, c["moe_intermediate_size"])
        else:
            yield from _mlp(f"{layer}.mlp", width, c["intermediate_size"])
