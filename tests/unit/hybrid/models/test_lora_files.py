"""PEFT folders are read, merged and gated as PEFT itself computes; the rest is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusion_checkpoints import tiny_diffusion
from diffusion_twin import Twin
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybrid.attention.pattern import bidirectional, causal
from hybrid.errors import CheckpointError, ConfigError
from hybrid.models.adapter import load_adapter
from hybrid.models.checkpoint import Int4Blocks, open_checkpoint
from hybrid.models.families import spec_from_config
from hybrid.models.family_table import FAMILIES
from hybrid.models.lora_files import LowRank, Merged, is_peft, read_updates
from hybrid.models.name_maps import LLADA, NEMOTRON, Renamed
from hybrid.models.tiny import tiny_checkpoint
from hybrid.models.transformer import NativeBackbone
from hybrid.protocols import Entry

TOKENS = [3, 17, 40, 5, 9]


def peft_model(folder: Path, family: str = "llama", **options: Any) -> tuple[Path, Path, Any]:
    """Return a checkpoint, a PEFT folder for it, and the model with both."""
    path = tiny_checkpoint(folder / "model", family, tokenizer=False)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    own = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "o_proj"], **options}
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **own)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" in name:
                value.copy_(0.2 * torch.randn(value.shape, generator=generator))
    model.save_pretrained(folder / "lora")
    return path, folder / "lora", model


def hybrid_backbone(path: Path, **fields: Any) -> NativeBackbone:
    checkpoint = open_checkpoint(path)
    own = {"mask_token_id": 7, "logit_shift": 0, "block_size": 6, **fields}
    spec = dataclasses.replace(spec_from_config(checkpoint.config), **own)
    return NativeBackbone(spec, checkpoint.tensors, reorder=True)


def everything(backbone: NativeBackbone, entry: Entry | None = None) -> Tensor:
    """Return the logits [T, V] of a pass over `TOKENS`: a draft pass with `entry`, else causal."""
    pattern = causal if entry is None else bidirectional
    out = backbone.forward(
        torch.tensor([TOKENS]) if entry is None else None,
        torch.arange(len(TOKENS))[None],
        pattern([0], len(TOKENS)),
        backbone.new_cache(1, len(TOKENS)),
        [0],
        entry=entry,
    )
    assert out.logits is not None
    return out.logits[0]


OPTIONS: dict[str, dict[str, Any]] = {
    "some": {},
    "all": {"target_modules": "all-linear"},
    "rslora": {"use_rslora": True},
    "regex": {"target_modules": r".*layers\.1\..*(k_proj|down_proj)"},
    "ranks": {"rank_pattern": {"o_proj": 2}},
    "one-layer": {"layers_to_transform": [2]},
    "gaussian": {"init_lora_weights": "gaussian"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@torch.no_grad()
def test_merged_weights_compute_what_peft_computes(
    tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    path, folder, model = peft_model(tmp_path, family, **options)
    checkpoint = open_checkpoint(path)
    spec, updates = spec_from_config(checkpoint.config), read_updates(folder, {})
    merged = NativeBackbone(spec, Merged(checkpoint.tensors, updates))
    ours, theirs = everything(merged), model(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    with model.disable_adapter():
        plain = model(torch.tensor([TOKENS])).logits[0]
    assert not torch.allclose(ours, plain, atol=1e-2), "else the comparison proves nothing"


@pytest.mark.parametrize("name", ["some", "all", "rslora"])
@torch.no_grad()
def test_a_gated_update_acts_in_draft_passes_alone(tmp_path: Path, name: str) -> None:
    path, folder, model = peft_model(tmp_path, **OPTIONS[name])
    backbone = hybrid_backbone(path)
    before = everything(backbone)
    adapter = load_adapter(backbone, folder)
    assert adapter.config.is_plain
    assert (adapter.config.num_draft_tokens, adapter.config.mask_token_id) == (5, 7)
    assert adapter.config.logit_shift == 0
    rows = adapter.draft_input(torch.tensor([TOKENS]), {})
    ours = everything(backbone, Entry(0, rows, adapter))
    full = torch.zeros(1, 1, len(TOKENS), len(TOKENS))
    theirs = model(torch.tensor([TOKENS]), attention_mask=full).logits[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert torch.equal(everything(backbone), before)
    assert not torch.allclose(ours, everything(backbone, Entry(0, rows, None)), atol=1e-2)


def test_names_of_other_families(tmp_path: Path) -> None:
    """LLaDA's blocks and Nemotron's encoder, as PEFT names what it finds in their own classes."""
    _, folder, _ = peft_model(tmp_path)
    pair = {"lora_A": torch.randn(4, 8), "lora_B": torch.randn(6, 4)}
    theirs = {
        "model.transformer.blocks.0.q_proj": "model.layers.0.self_attn.q_proj",
        "model.transformer.blocks.11.attn_out": "model.layers.11.self_attn.o_proj",
        "model.transformer.blocks.1.ff_out": "model.layers.1.mlp.down_proj",
        "model.transformer.ff_out": "lm_head",
    }
    nemotron = {
        "encoder.layers.3.self_attn.o_proj": "model.layers.3.self_attn.o_proj",
        "diffusion_head": "lm_head",
    }
    for table, names in ((theirs, LLADA), (nemotron, NEMOTRON)):
        tensors = {
            f"base_model.model.{name}.{part}.weight": value.clone()
            for name in table
            for part, value in pair.items()
        }
        save_file(tensors, folder / "adapter_model.safetensors")
        updates = read_updates(folder, names)
        assert set(updates) == set(table.values())
        for update in updates.values():
            assert (update.rank, update.scale) == (4, 1.5)
            expected = 1.5 * pair["lora_B"] @ pair["lora_A"]
            torch.testing.assert_close(update.dense(), expected)


@pytest.mark.parametrize("case", ["llada", "dream"])
def test_an_update_that_acts_always_is_in_the_weights(tmp_path: Path, case: str) -> None:
    """As D2F's: rank 32 on q, k, v and the attention's output, under the family's own names."""
    path, twin = tiny_diffusion(tmp_path, case), Twin(tiny_diffusion(tmp_path, case))
    before = Twin(path)
    block = "model.transformer.blocks.{}.{}" if case == "llada" else "model.layers.{}.self_attn.{}"
    output = "attn_out" if case == "llada" else "o_proj"
    tensors, draw = {}, torch.Generator().manual_seed(0)
    for name in (
        block.format(n, p) for n in (0, 1) for p in ("q_proj", "k_proj", "v_proj", output)
    ):
        outputs, inputs = twin.tensors[f"{name}.weight"].shape
        a, b = torch.randn(32, inputs, generator=draw), torch.randn(outputs, 32, generator=draw)
        a, b = 0.1 * a, 0.1 * b
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
        twin.tensors[f"{name}.weight"] += b.double() @ a.double()
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 32, "lora_alpha": 32, "target_modules": ["any"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(path)
    spec = spec_from_config(checkpoint.config)
    names = FAMILIES[spec.family].names
    weights = Merged(Renamed(checkpoint.tensors, names), read_updates(tmp_path, names))
    backbone, size = NativeBackbone(spec, weights, reorder=True), len(TOKENS)
    pattern = bidirectional([0], size)
    cache = backbone.new_cache(1, size)
    out = backbone.forward(torch.tensor([TOKENS]), torch.arange(size)[None], pattern, cache, [0])
    assert out.logits is not None
    expected = twin.logits(TOKENS, pattern.local)
    torch.testing.assert_close(out.logits[0].double(), expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(expected, before.logits(TOKENS, pattern.local), atol=0.1)


def test_only_what_is_taken_is_read_and_changed() -> None:
    class Counting(dict[str, Tensor | Int4Blocks]):
        taken: list[str]

        def __getitem__(self, name: str) -> Tensor | Int4Blocks:
            self.taken.append(name)
            return super().__getitem__(name)

    weight, blocks = torch.randn(16, 32), Int4Blocks.quantize(torch.randn(16, 32))
    weights = Counting({"a.weight": weight.bfloat16(), "b.weight": blocks, "a.bias": weight[0]})
    weights.taken = []
    update = LowRank(torch.randn(2, 32), torch.randn(16, 2), 0.5)
    merged = Merged(weights, {"a": update, "b": update})
    assert list(merged) == list(weights)
    assert len(merged) == 3
    assert "a.weight" in merged
    assert "c.weight" not in merged
    assert weights.taken == []
    assert torch.equal(torch.as_tensor(merged["a.bias"]), weight[0])
    for name, base in (
        ("a.weight", weight.bfloat16().float()),
        ("b.weight", blocks.dequantize(torch.float32)),
    ):
        value = merged[name]
        assert isinstance(value, Tensor)
        assert value.dtype == torch.float32, "rounded once, by whoever takes it"
        torch.testing.assert_close(value, base + 0.5 * update.b @ update.a)
    assert weights.taken == ["a.bias", "a.weight", "b.weight"]


def test_an_update_of_another_model_is_refused(tmp_path: Path) -> None:
    path, folder, _ = peft_model(tmp_path)
    checkpoint, updates = open_checkpoint(path), read_updates(folder, {})
    with pytest.raises(CheckpointError, match=r"another model: it updates model\.layers\.9"):
        Merged(checkpoint.tensors, {**updates, "model.layers.9.mlp.up_proj": LowRank(*[None] * 3)})  # type: ignore[arg-type]
    name = "model.layers.0.self_attn.q_proj"
    narrow = dataclasses.replace(updates[name], a=updates[name].a[:, 1:])
    with pytest.raises(
        CheckpointError, match=r"q_proj.weight is \[64, 63\], the weight \[64, 64\]"
    ):
        Merged(checkpoint.tensors, {name: narrow})[f"{name}.weight"]


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "got peft_type 'IA3', expected 'LORA'"),
    ({"use_dora": True}, "use_dora is True, which is not computed here"),
    ({"bias": "all"}, "bias is 'all'"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save is"),
    ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern is"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
    ({"lora_alpha": None}, "cannot be read: TypeError"),
]


@pytest.mark.parametrize(("change", "match"), CHANGES)
def test_what_is_not_computed_is_refused(
    tmp_path: Path, change: dict[str, Any], match: str
) -> None:
    _, folder, _ = peft_model(tmp_path)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(CheckpointError, match=match):
        read_updates(folder, {})


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    _, folder, _ = peft_model(tmp_path)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    first = next(name for name in tensors if "lora_A" in name)
    embedding = "base_model.model.model.embed_tokens.lora_embedding_A"
    damaged: list[tuple[dict[str, Tensor], str]] = [
        ({n: t for n, t in tensors.items() if n != first}, "do not belong together"),
        ({**tensors, first: tensors[first][:2].clone()}, "do not belong together"),
        ({**tensors, embedding: torch.zeros(4, 64)}, "lora_embedding_A.*matrices"),
        ({**tensors, first: torch.zeros(4, 64, 3)}, r"\[4, 64, 3\], expected matrices"),
        ({}, "holds no update"),
    ]
    for content, match in damaged:
        save_file(content, path)
        with pytest.raises(CheckpointError, match=match):
            read_updates(folder, {})
    path.write_bytes(b"\xff" * 99)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_updates(folder, {})
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_updates(folder, {})


@pytest.mark.parametrize("name", ["regex", "ranks", "one-layer"])
def test_a_draft_pass_has_the_same_updates_in_all_layers(tmp_path: Path, name: str) -> None:
    path, folder, _ = peft_model(tmp_path, **OPTIONS[name])
    with pytest.raises(CheckpointError, match="expected one of each, for the same of q_proj"):
        load_adapter(hybrid_backbone(path), folder)


def test_who_may_take_a_peft_folder(tmp_path: Path) -> None:
    """A model without masks cannot draft with it; a folder of ours that lost a file is not one."""
    path, folder, _ = peft_model(tmp_path)
    assert is_peft(folder)
    with pytest.raises(CheckpointError, match=r"no file draft_config\.json"):
        load_adapter(hybrid_backbone(path, mask_token_id=None), folder)
    with pytest.raises(ConfigError, match="from the token before it"):
        load_adapter(hybrid_backbone(path, logit_shift=1), folder)
    (folder / "draft_model.safetensors").write_bytes(b"")
    assert not is_peft(folder)
    with pytest.raises(CheckpointError, match=r"no file draft_config\.json"):
        load_adapter(hybrid_backbone(path), folder)
