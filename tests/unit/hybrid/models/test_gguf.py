"""GGUF: against the checkpoint it was written from, gguf's own numbers, and transformers."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hybrid.errors import CheckpointError
from hybrid.models.checkpoint import Int4Blocks, Int8Blocks, open_checkpoint
from hybrid.models.gguf import read_gguf

CONFIG_KEYS = (
    "architectures",
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_parameters",
    "tie_word_embeddings",
)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "num_kv_heads": 4}),
        ("llama", {"tie_word_embeddings": True, "num_kv_heads": 1}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
    ],
    ids=["llama", "llama-biases", "llama-tied", "qwen2", "qwen3"],
)
def test_dense_tensors_and_config_are_the_original(make_gguf, family, settings):
    folder, file = make_gguf(family, **settings)
    original, read = open_checkpoint(folder), read_gguf(file, torch.float32)
    assert set(read.tensors) == set(original.tensors)
    for name, tensor in original.tensors.items():
        assert torch.equal(read.tensors[name], tensor.float()), name
    for key in CONFIG_KEYS:
        assert read.config[key] == original.config[key], key
    for key in ("attention_bias", "mlp_bias"):
        assert read.config.get(key, False) == original.config.get(key, False)


@pytest.mark.parametrize("quant", ["Q4_0", "Q5_1", "F16", "BF16"])
def test_other_types_are_dequantised(make_gguf, quant):
    folder, file = make_gguf("qwen2", quant)
    original, read = open_checkpoint(folder), read_gguf(file, torch.bfloat16)
    kind = gguf.GGMLQuantizationType[quant]
    for name in ("model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"):
        weight = original.tensors[name].float().numpy()
        expected = gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)
        assert torch.equal(read.tensors[name], torch.from_numpy(expected).bfloat16())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_q4_1_layers_keep_their_blocks(make_gguf, family):
    folder, file = make_gguf(family, "Q4_1")
    original = open_checkpoint(folder)
    packed = read_gguf(file, torch.bfloat16)
    dense = read_gguf(file, torch.float32, keep_blocks=False)
    kind = gguf.GGMLQuantizationType.Q4_1
    for name, tensor in original.tensors.items():
        if name.split(".")[-2].endswith("_proj") and tensor.dim() == 2:
            # A row permutation commutes with quantisation in rows.
            expected = gguf.quants.dequantize(
                gguf.quants.quantize(tensor.float().numpy(), kind), kind
            )
            assert isinstance(packed.tensors[name], Int4Blocks), name
            assert torch.equal(
                packed.tensors[name].dequantize(torch.float32), torch.from_numpy(expected)
            )
            assert torch.equal(dense.tensors[name], torch.from_numpy(expected))
        else:
            assert torch.equal(packed.tensors[name], tensor.bfloat16()), name


def test_q8_0_matrices_keep_their_blocks(make_gguf):
    folder, file = make_gguf("qwen2", "Q8_0")
    original, read = open_checkpoint(folder), read_gguf(file, torch.bfloat16)
    kind = gguf.GGMLQuantizationType.Q8_0
    name = "model.layers.1.mlp.down_proj.weight"
    quantised = gguf.quants.quantize(original.tensors[name].float().numpy(), kind)
    expected = torch.from_numpy(gguf.quants.dequantize(quantised, kind))
    assert isinstance(read.tensors[name], Int8Blocks)
    assert torch.equal(read.tensors[name].dequantize(torch.float32), expected)


def test_q4_1_nibbles_go_to_their_columns():
    """By hand: block 0 of row 1 is d 2, m -1 and levels 0..15, 15..0; written byte by byte."""
    from hybrid.models.gguf import _q4_1_blocks

    levels = [*range(16), *reversed(range(16))]
    block = np.zeros((2, 20), dtype=np.uint8)
    block[1, :4] = np.array([2, -1], dtype=np.float16).view(np.uint8)
    block[1, 4:] = [levels[j] | levels[j + 16] << 4 for j in range(16)]
    weight = _q4_1_blocks(block)
    assert weight.quants[1].tolist() == [levels[2 * k] | levels[2 * k + 1] << 4 for k in range(16)]
    assert weight.dequantize(torch.float32)[1].tolist() == [2 * q - 1 for q in levels]
    assert not weight.dequantize(torch.float32)[0].any()


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling(make_gguf, kind):
    def extra(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(512)

    _, file = make_gguf(extra=extra)
    rope = read_gguf(file, torch.float32).config["rope_parameters"]
    expected = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "yarn":
        expected["original_max_position_embeddings"] = 512
    assert rope == expected


def _divisors(folder, rope):
    config = AutoConfig.from_pretrained(folder)
    config.rope_parameters = dict(rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    dim = config.head_dim
    plain = 1 / rope["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim)
    return (plain / scaled).numpy()


def test_llama3_rope_is_recovered_from_its_divisors(make_gguf):
    settings = {"rope": LLAMA3, "head_dim": 64}
    folder, _ = make_gguf(**settings)
    divisors = _divisors(folder, LLAMA3)
    assert len(set(divisors)) > 2  # the smooth part between the two plateaus is there

    def extra(writer):
        writer.add_tensor("rope_freqs.weight", divisors)

    _, file = make_gguf(extra=extra, **settings)
    read = read_gguf(file, torch.float32)
    assert read.config["rope_parameters"] == LLAMA3
    assert "rope_freqs.weight" not in read.tensors


def test_other_rope_divisors_are_refused(make_gguf):
    def extra(writer):
        writer.add_tensor("rope_freqs.weight", np.linspace(1, 3, 8, dtype=np.float32))

    _, file = make_gguf(extra=extra)
    with pytest.raises(CheckpointError, match="RoPE divisors"):
        read_gguf(file, torch.float32)


def test_special_tokens_reach_both_configs(make_gguf):
    def extra(writer):
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_eot_token_id(3)
        writer.add_pad_token_id(2)

    _, file = make_gguf(extra=extra)
    read = read_gguf(file, torch.float32)
    assert read.eos_token_ids == (2, 3)
    assert read.generation_config == {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 2}
    assert read.generation_config.items() <= read.config.items()


def test_missing_file(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        read_gguf(tmp_path / "none.gguf", torch.float32)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.5, 0.999])
def test_truncated_file(make_gguf, tmp_path, share):
    _, file = make_gguf()
    content = file.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CheckpointError, match="truncated"):
        read_gguf(cut, torch.float32)


def test_not_a_gguf(tmp_path):
    file = tmp_path / "x.gguf"
    file.write_bytes(b"PK\x03\x04" * 1000)
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        read_gguf(file, torch.float32)


def test_unknown_architecture_and_tensors(make_gguf, tmp_path):
    file = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(file, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="'mamba' is not read"):
        read_gguf(file, torch.float32)

    def extra(writer):
        writer.add_tensor("blk.0.ffn_gate_exps.weight", np.zeros((2, 32, 32), dtype=np.float32))

    _, file = make_gguf(extra=extra)
    with pytest.raises(CheckpointError, match="ffn_gate_exps"):
        read_gguf(file, torch.float32)


def test_one_part_of_a_split_file_is_refused(make_gguf, monkeypatch):
    real = gguf.GGUFWriter.add_tensor

    def drop(self, name, *args, **kwargs):
        if name != "blk.1.ffn_up.weight":
            real(self, name, *args, **kwargs)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", drop)
    _, file = make_gguf()
    with pytest.raises(CheckpointError, match=r"lacks 1 tensors.*layers\.1\.mlp\.up_proj"):
        read_gguf(file, torch.float32)


def test_default_model_equals_transformers_reading(default_gguf):
    """Every tensor of transformers' own reading of the same file, in float32, bit for bit."""
    model = AutoModelForCausalLM.from_pretrained(
        default_gguf.parent, gguf_file=default_gguf.name, dtype=torch.float32
    )
    expected = model.state_dict()
    expected.pop("lm_head.weight")  # tied
    read = read_gguf(default_gguf, torch.float32)
    assert set(read.tensors) == set(expected)
    num_packed = 0
    for name, tensor in expected.items():
        ours = read.tensors[name]
        if not isinstance(ours, torch.Tensor):
            num_packed += isinstance(ours, Int4Blocks)
            ours = ours.dequantize(torch.float32)
        assert torch.equal(ours, tensor), name
    assert num_packed == 7 * 30
    assert isinstance(read.tensors["model.embed_tokens.weight"], Int8Blocks)
    for key, value in read.config.items():
        if key not in ("architectures", "rms_norm_eps"):
            assert getattr(model.config, key) == value, key
    assert np.float32(read.config["rms_norm_eps"]) == np.float32(model.config.rms_norm_eps)
