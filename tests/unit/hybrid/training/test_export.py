"""Adapter folders: stock PEFT reads them, they are small, their card says how they were made."""

from __future__ import annotations

import json
import shlex
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import tiny_backbone
from peft import PeftModel
from transformers import AutoModelForCausalLM

from hybrid import __version__, files
from hybrid.cli import train as cli_train
from hybrid.errors import CheckpointError
from hybrid.models.adapter import DiffusionAdapter, LoraLinear, load_adapter
from hybrid.models.checkpoint import open_checkpoint
from hybrid.models.draft_config import DraftConfig, base_shape
from hybrid.models.families import spec_from_config
from hybrid.models.spec import ModelSpec, RopeSpec
from hybrid.models.store import public_name
from hybrid.models.tiny import tiny_checkpoint
from hybrid.models.transformer import NativeBackbone
from hybrid.revision import Revision, git_revision
from hybrid.training.loop import train
from hybrid.training.self_diffusion.card import code_row, command_line, write_card
from hybrid.training.self_diffusion.config import SelfDiffusionConfig
from hybrid.training.self_diffusion.draft_model import DraftModel
from hybrid.training.self_diffusion.export import save_adapter
from hybrid.training.self_diffusion.recipe import build

FAMILIES = {
    "llama": ("llama", {"attention_bias": True}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 24}),
    "mistral": ("mistral", {"sliding_window": 6}),
}


def saved_adapter(path: Path, folder: Path, dtype: torch.dtype) -> tuple[Any, NativeBackbone]:
    checkpoint = open_checkpoint(path)
    backbone = NativeBackbone(spec_from_config(checkpoint.config), checkpoint.tensors)
    config = DraftConfig(3, 1, (0, 2), 4, 6.0, base_shape(backbone))
    model = DraftModel(backbone, config)
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(generator=torch.Generator().manual_seed(value.numel()))
    save_adapter(folder, config, model.adapter_tensors(), base_model="tiny", dtype=dtype)
    return model, backbone


@pytest.mark.parametrize("family", FAMILIES)
def test_stock_peft_loads_it(tmp_path: Path, family: str) -> None:
    kind, fields = FAMILIES[family]
    path = tiny_checkpoint(tmp_path / "model", kind, tokenizer=False, **fields)
    model, backbone = saved_adapter(path, tmp_path / "adapter", torch.float32)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # PEFT warns of missing keys
        peft = PeftModel.from_pretrained(base, tmp_path / "adapter")
    result = peft.load_adapter(tmp_path / "adapter", "again")
    assert not result.unexpected_keys
    assert not [name for name in result.missing_keys if "lora" in name]
    own = {n: v for n, v in model.adapter_tensors().items() if ".lora_" in n}
    theirs = {
        name.replace(".default.", "."): value.detach()
        for name, value in peft.named_parameters()
        if ".default." in name
    }
    assert theirs.keys() == own.keys()
    assert all(torch.equal(theirs[name], own[name]) for name in own)

    # And it means the same: one projection of each kind on the same input.
    adapter = load_adapter(backbone, tmp_path / "adapter")
    x = torch.randn(8, backbone.hidden_size, generator=torch.Generator().manual_seed(0))
    layer = peft.base_model.model.model.layers[1]
    attention = layer.self_attn
    qkv = torch.cat([p(x) for p in (attention.q_proj, attention.k_proj, attention.v_proj)], dim=1)
    gate_up = torch.cat([layer.mlp.gate_proj(x), layer.mlp.up_proj(x)], dim=1)
    for ours, expected in ((adapter.layers[1].qkv, qkv), (adapter.layers[1].gate_up, gate_up)):
        assert isinstance(ours, LoraLinear)
        torch.testing.assert_close(ours(x), expected, rtol=1e-5, atol=1e-4)


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "model", tokenizer=False)
    model, backbone = saved_adapter(path, tmp_path / "adapter", torch.bfloat16)
    adapter = load_adapter(backbone, tmp_path / "adapter")
    bound = DiffusionAdapter(
        backbone, model.config, {n: t.bfloat16() for n, t in model.adapter_tensors().items()}
    )
    assert adapter.config == model.config
    rows, hidden = (
        torch.tensor([[3, -1, 5]]),
        {n: torch.randn(1, backbone.hidden_size) for n in model.config.taps},
    )
    entered = [a.draft_input(rows, hidden) for a in (adapter, bound)]
    assert torch.equal(*entered)
    assert torch.equal(adapter.head.norm, bound.head.norm)
    assert torch.equal(adapter.layers[2].down.b.weight, bound.layers[2].down.b.weight)
    for file in (tmp_path / "adapter").iterdir():
        assert file.suffix in {".json", ".safetensors"}
        assert (
            file.stat().st_mode & 0o777 == (tmp_path / "model/config.json").stat().st_mode & 0o777
        )


class _Shape:
    """A backbone of the default model's shape, without its weights."""

    spec = ModelSpec(
        "llama", 49152, 576, 1536, 30, 9, 3, 64, 1e-5, 8192, RopeSpec(), (None,) * 30,
        tie_embeddings=True,
    )  # fmt: skip


def test_the_default_recipe_is_small(tmp_path: Path) -> None:
    recipe = SelfDiffusionConfig(data=tmp_path, output=tmp_path)
    shape = base_shape(_Shape())  # type: ignore[arg-type]
    entry_layer, feature_layers = recipe.layers(30)
    assert (entry_layer, feature_layers) == (20, (2, 10, 19, 28))
    config = DraftConfig(
        recipe.num_draft_tokens, entry_layer, feature_layers, recipe.rank, recipe.lora_alpha, shape
    )
    tiny = DraftModel(tiny_backbone(), DraftConfig(1, 1, (0,), 1, 1.0, {}))
    layers, width = range(config.entry_layer, 30), 576
    sizes = {"q": 576 * 2, "k": 576 + 192, "v": 576 + 192, "o": 576 * 2}
    sizes |= {"gate": 576 + 1536, "up": 576 + 1536, "down": 576 + 1536}
    tensors = {
        "norm.weight": torch.zeros(width),
        "slots": torch.zeros(9, width),
        "mask": torch.zeros(width),
        "project": torch.zeros(width, 2 * width),
        "features": torch.zeros(width, 4 * width),
    }
    one_layer = [n for n in tiny.adapter_tensors() if "layers.1." in n]
    for index in layers:
        for name in one_layer:
            size = next((s for k, s in sizes.items() if f".{k}_proj.lora_A" in name), 0)
            size = size * 32 if size else 0 if "lora" in name else width  # A and B as one
            tensors[name.replace("layers.1.", f"layers.{index}.")] = torch.zeros(size)
    assert sum(t.numel() for t in tensors.values()) == pytest.approx(5.26e6, rel=0.01)
    save_adapter(tmp_path / "adapter", config, tensors, base_model="tiny")
    total = sum(p.stat().st_size for p in (tmp_path / "adapter").iterdir())
    assert total <= 12e6


def test_a_full_disk_leaves_the_old_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_checkpoint(tmp_path / "model", tokenizer=False)
    model, _ = saved_adapter(path, tmp_path / "adapter", torch.bfloat16)
    before = {p.name: p.read_bytes() for p in (tmp_path / "adapter").iterdir()}

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"cannot be written: .*No space left"):
        save_adapter(tmp_path / "adapter", model.config, model.adapter_tensors(), base_model="x")
    assert {p.name: p.read_bytes() for p in (tmp_path / "adapter").iterdir()} == before


def test_names_of_the_base_are_no_paths(tmp_path: Path) -> None:
    assert public_name("default") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert public_name("org/name") == "org/name"
    (tmp_path / "my-model").mkdir()
    assert public_name(str(tmp_path / "my-model")) == "my-model"


def test_card(make_config: Callable[..., SelfDiffusionConfig]) -> None:
    config = make_config(steps=8, seed=5)
    folder = train(build(config))
    text = (folder / "README.md").read_text()
    front = text.split("---\n")[1]
    assert "license" not in front, "the base model's, whatever that is"
    assert f"base_model: {Path(config.model).name}\n" in front
    rows = (config.output / "metrics.jsonl").read_text().splitlines()
    last = json.loads(rows[-1])
    for word in (
        "`data.jsonl`, 48 examples, the last 4 of them held out",
        "| seed | 5 |",
        "| steps | 8 |",
        "| hours | 0.0",
        f"torch {torch.__version__}",
        f"| code | {code_row(git_revision())} |",
        f"**{last['expected_acceptance_length']:.2f}**",
        "| 1 | 2 | 3 | 4 |",
        "| " + " | ".join(f"{100 * v:.0f} %" for v in last["accuracy_by_position"]) + " |",
        command_line(config),
    ):
        assert word in text
    assert str(config.data.parent) not in text, "no path of this machine"


def test_the_card_names_the_code() -> None:
    released = f"hybrid-decoder {__version__}"
    assert code_row(Revision()) == released
    assert code_row(Revision("ab12", False)) == f"{released}, commit ab12"
    assert code_row(Revision("ab12", True)) == f"{released}, commit ab12, modified"


def test_a_card_needs_a_finished_run(make_config: Callable[..., SelfDiffusionConfig]) -> None:
    config = make_config()
    with pytest.raises(CheckpointError, match="holds no training run"):
        write_card(config.output)
    train(build(config))
    (config.output / "metrics.jsonl").unlink()
    with pytest.raises(CheckpointError, match="has no evaluation yet"):
        write_card(config.output)


def test_the_cards_command_line_makes_the_same_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    config = SelfDiffusionConfig(
        data="d 1.jsonl", output="run", model="org/name", steps=7, learning_rate=2e-4, seed=3,
        feature_layers=(1,), rank=8, keep_contexts=True, decay=1.5,
    )  # fmt: skip
    seen = []
    monkeypatch.setattr(cli_train, "_run", lambda name, config: seen.append(config))
    words = shlex.split(command_line(config))
    assert words[:3] == ["hybrid", "train", "self-diffusion"]
    assert "--seed" in words
    assert not any("warmup" in word for word in words), "defaults are left out"
    cli_train.app(words[2:], standalone_mode=False)
    assert seen == [config]
