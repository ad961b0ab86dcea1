"""Every diffusion family computes what its format says, under the masks that it is decoded with."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusion_checkpoints import CONFIGS, MASK, tiny_diffusion
from diffusion_twin import Twin
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybrid.attention.pattern import AttentionPattern, bidirectional, causal
from hybrid.errors import CheckpointError
from hybrid.models.loading import load_model
from hybrid.models.tiny import tiny_checkpoint
from hybrid.models.transformer import NativeBackbone
from hybrid.types import Context

GOLDEN = Path(os.environ.get("HYBRID_GOLDEN_DIR") or Path(__file__).parents[3] / "golden")
GOLDEN_MODELS = sorted(path.parent for path in GOLDEN.glob("*/cases.json"))


def native(path: Path, **options: Any) -> NativeBackbone:
    backbone = load_model(path, device="cpu", **options).backbone
    assert isinstance(backbone, NativeBackbone)
    return backbone


def tokens(num: int, seed: int = 3) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 40, (num,), generator=generator).tolist()


def run(backbone: NativeBackbone, ids: list[int], pattern: AttentionPattern) -> Tensor:
    """Return the logits [T, V] of one pass over an empty cache."""
    positions = torch.arange(len(ids))[None]
    cache = backbone.new_cache(1, len(ids))
    logits = backbone.forward(torch.tensor([ids]), positions, pattern, cache, [0]).logits
    assert logits is not None
    return logits[0]


def block_causal(num_tokens: int, block_size: int) -> AttentionPattern:
    block = torch.arange(num_tokens) // block_size
    return AttentionPattern((0,), block[:, None] >= block)


def patterns(backbone: NativeBackbone, num_tokens: int) -> dict[str, AttentionPattern]:
    """The masks under which a family is decoded."""
    size = backbone.block_size or 4
    if backbone.context is Context.BLOCK_CAUSAL:
        return {"blocks": block_causal(num_tokens, size)}
    if backbone.context is Context.BIDIRECTIONAL:
        return {"all": bidirectional((0,), num_tokens)}
    return {"causal": causal((0,), num_tokens), "all": bidirectional((0,), num_tokens)}


def check_against_twin(path: Path, ids: list[int]) -> None:
    backbone, twin = native(path), Twin(path)
    for name, pattern in patterns(backbone, len(ids)).items():
        expected = twin.logits(ids, pattern.local)
        ours = run(backbone, ids, pattern).double()
        assert (ours - expected).abs().max() < 2e-5 * expected.abs().max(), name
        assert expected.std(dim=0).mean() > 0.1  # tokens do differ


# ---- the same numbers


@pytest.mark.parametrize("case", CONFIGS)
def test_forward_equals_the_float64_twin(case: str, tmp_path: Path) -> None:
    """Nemotron's tokens lie in three steps of its query scale (16 positions each)."""
    check_against_twin(tiny_diffusion(tmp_path, case), [*tokens(30), MASK, MASK, *tokens(4), MASK])


@pytest.mark.parametrize("path", GOLDEN_MODELS, ids=lambda path: path.name)
def test_forward_equals_the_float64_twin_on_golden_models(path: Path) -> None:
    case = json.loads((path / "cases.json").read_text(encoding="utf-8"))["cases"][0]
    check_against_twin(path, (case["prompt"] + case["expected"])[:80])


@pytest.mark.parametrize(
    ("family", "stock", "fields"),
    [
        ("Dream", "qwen2", {}),
        ("Fast_dLLM_Qwen", "qwen2", {}),
        ("a2d-qwen2", "qwen2", {}),
        ("wedlm", "qwen2", {}),
        ("wedlm", "qwen3", {"qk_norm": True, "attention_bias": False}),
        ("sdar", "qwen3", {}),
        ("a2d-qwen3", "qwen3", {}),
        ("a2d-llama", "llama", {}),
        (
            "sdar_moe",
            "qwen3_moe",
            {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        ),
    ],
)
def test_stock_layouts_equal_transformers(
    family: str, stock: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    """Under a causal mask, which is the only one that transformers' classes have."""
    path = tiny_checkpoint(tmp_path, stock, tokenizer=False, mask_token_id=MASK, **fields)
    reference = AutoModelForCausalLM.from_pretrained(path).eval()
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": family, **fields}  # 5.24 writes `num_experts` under another name
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    ids = tokens(24)
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    ours = run(native(path), ids, causal((0,), len(ids)))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)


def test_nemotron_equals_ministral_beyond_the_trained_context(tmp_path: Path) -> None:
    path = tiny_diffusion(tmp_path / "theirs", "nemotron")
    renamed = tmp_path / "ministral"
    renamed.mkdir()
    stored = load_file(path / "model.safetensors")
    names = {"encoder.": "model.", "diffusion_head.": "lm_head."}
    for theirs, stock in names.items():
        stored = {name.replace(theirs, stock): value for name, value in stored.items()}
    save_file(stored, str(renamed / "model.safetensors"), {"format": "pt"})
    config = {**CONFIGS["nemotron"], "model_type": "ministral3"}
    config["architectures"] = ["Ministral3ForCausalLM"]
    (renamed / "config.json").write_text(json.dumps(config), encoding="utf-8")
    reference = AutoModelForCausalLM.from_pretrained(renamed).eval()
    ids = tokens(150)
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    ours = run(native(path), ids, causal((0,), len(ids)))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
    assert torch.equal(ours, run(native(renamed), ids, causal((0,), len(ids))))


def test_a_query_scale_depends_on_the_position_not_on_the_pass(tmp_path: Path) -> None:
    backbone, ids = native(tiny_diffusion(tmp_path, "nemotron")), tokens(40)
    cache = backbone.new_cache(1, len(ids))
    whole = run(backbone, ids, causal((0,), len(ids)))
    for index, token in enumerate(ids):
        pattern, position = causal((index,), 1), torch.tensor([[index]])
        out = backbone.forward(torch.tensor([[token]]), position, pattern, cache, [0])
        cache.commit(0, 1)
        assert out.logits is not None
        torch.testing.assert_close(out.logits[0, 0], whole[index], rtol=0, atol=1e-4)


# ---- names


def rewritten(path: Path, target: Path, tensors: dict[str, Tensor]) -> Path:
    target.mkdir()
    shutil.copy(path / "config.json", target)
    save_file(tensors, str(target / "model.safetensors"))
    return target


def test_fused_and_split_projections_are_the_same_model(tmp_path: Path) -> None:
    """LLaDA2 stores q, k, v in one; LLaDA and Qwen apart: either may come the other way."""
    ids, pattern = tokens(12), bidirectional((0,), 12)
    fused = tiny_diffusion(tmp_path / "fused", "llada2")
    tensors = load_file(fused / "model.safetensors")
    for name in [name for name in tensors if "query_key_value" in name]:
        for part, value in zip("qkv", tensors.pop(name).split([32, 16, 16]), strict=True):
            tensors[name.replace("query_key_value", f"{part}_proj")] = value.clone()
    split = rewritten(fused, tmp_path / "split", tensors)
    assert torch.equal(run(native(fused), ids, pattern), run(native(split), ids, pattern))

    apart = tiny_diffusion(tmp_path / "apart", "dream")
    tensors = load_file(apart / "model.safetensors")
    for layer in range(2):
        for block, names in (("self_attn", "qkv"), ("mlp", ("gate", "up"))):
            prefix = f"model.layers.{layer}.{block}"
            fused_name = f"{prefix}.{'qkv' if block == 'self_attn' else 'gate_up'}_proj"
            for kind in ("weight", "bias") if block == "self_attn" else ("weight",):
                parts = [tensors.pop(f"{prefix}.{n}_proj.{kind}") for n in names]
                tensors[f"{fused_name}.{kind}"] = torch.cat(parts)
    joined = rewritten(apart, tmp_path / "joined", tensors)
    assert torch.equal(run(native(apart), ids, pattern), run(native(joined), ids, pattern))


@pytest.mark.parametrize(
    ("case", "tensor", "canonical"),
    [
        ("llada", "model.transformer.ff_out.weight", "lm_head.weight"),
        (
            "llada",
            "model.transformer.blocks.1.ff_out.weight",
            "model.layers.1.mlp.down_proj.weight",
        ),
        (
            "llada2",
            "model.layers.2.mlp.experts.7.up_proj.weight",
            "model.layers.2.mlp.experts.7.up_proj.weight",
        ),
        ("llada2", "model.layers.1.mlp.gate.expert_bias", "model.layers.1.mlp.gate.expert_bias"),
        ("nemotron", "encoder.norm.weight", "model.norm.weight"),
        (
            "dream",
            "model.layers.0.self_attn.k_proj.bias",
            "model.layers.0.self_attn.k_proj.bias",
        ),
    ],
)
def test_a_missing_or_misshapen_tensor_is_named(
    case: str, tensor: str, canonical: str, tmp_path: Path
) -> None:
    path = tiny_diffusion(tmp_path / "whole", case)
    tensors = load_file(path / "model.safetensors")
    value = tensors.pop(tensor)
    family = CONFIGS[case]["model_type"]
    with pytest.raises(CheckpointError, match=f"no tensor '{canonical}', which {family} needs"):
        native(rewritten(path, tmp_path / "missing", tensors))
    tensors[tensor] = value[:-1].clone()
    got, want = list(value[:-1].shape), list(value.shape)
    with pytest.raises(CheckpointError) as error:
        native(rewritten(path, tmp_path / "misshapen", tensors))
    assert str(error.value).startswith(f"{canonical}: got shape {got}, expected {want}")
