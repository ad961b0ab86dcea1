"""Diffusion adapters for other engines: plain ones alone, and where drafts mean the same."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import random_prompts, tiny_backbone
from safetensors.torch import load_file

from hybrid import HybridDecoder
from hybrid.errors import ConfigError
from hybrid.export.export import export
from hybrid.models.adapter import load_adapter
from hybrid.models.draft_config import DraftConfig, base_shape, lora_prefix, projection_shapes
from hybrid.models.tiny import tiny_checkpoint
from hybrid.training.self_diffusion.export import save_adapter

PLAIN: dict[str, Any] = {"entry_layer": 0, "feature_layers": (), "train_norms": False}
KINDS: dict[str, dict[str, Any]] = {
    "uniform": {**PLAIN, "corruption": "uniform"},
    "mask": {**PLAIN, "corruption": "mask", "mask_token_id": 7},
    "late": {"entry_layer": 1, "feature_layers": (0,), "sampler_size": 4, "draft_vocab_size": 16},
}


def saved(folder: Path, kind: str) -> Path:
    """Write an adapter of random weights; of late ones the shape is all that is looked at."""
    backbone = tiny_backbone()
    config = DraftConfig(5, rank=2, lora_alpha=4, base=base_shape(backbone), **KINDS[kind])
    tensors = {}
    for index in range(config.entry_layer, backbone.num_layers):
        for name, (inputs, outputs) in projection_shapes(backbone.spec).items():
            prefix = lora_prefix(index, name)
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(2, inputs)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, 2)
    tensors["norm.weight"] = torch.randn(4) if kind == "late" else torch.empty(0)
    save_adapter(folder, config, tensors, base_model="org/target", dtype=torch.float32)
    return folder


@pytest.mark.parametrize(
    ("engine", "kind"), [("sglang", "uniform"), ("hf", "uniform"), ("hf", "mask")]
)
def test_a_plain_adapter_comes_back_as_it_was(engine: str, kind: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "adapter", kind)
    done = export(engine, folder, tmp_path / "out")
    assert done.kind == "adapter"
    before = load_file(folder / "adapter_model.safetensors")
    after = load_file(done.folder / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    backbone = tiny_backbone()
    assert load_adapter(backbone, done.folder).config == load_adapter(backbone, folder).config
    # No second file of tensors, and nothing that only activated LoRA knows.
    assert [p.name for p in done.folder.glob("*.safetensors")] == ["adapter_model.safetensors"]
    raw = json.loads((done.folder / "adapter_config.json").read_text())
    assert not [name for name in raw if "alora" in name]
    assert raw["base_model_name_or_path"] == "org/target"


def test_peft_loads_what_sglang_serves(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    path = tiny_checkpoint(tmp_path / "model", "llama", tokenizer=False)
    done = export(
        "sglang", saved(tmp_path / "adapter", "uniform"), tmp_path / "out", target=str(path)
    )
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, done.folder)
    theirs = {n.replace(".default.", "."): p for n, p in adapted.named_parameters() if "lora" in n}
    written = load_file(done.folder / "adapter_model.safetensors")
    assert theirs.keys() == written.keys()
    assert all(torch.equal(theirs[name], value) for name, value in written.items())


def test_commands_of_adapters(tmp_path: Path) -> None:
    folder = saved(tmp_path / "adapter", "uniform")
    words = shlex.split(export("sglang", folder, tmp_path / "one").command)
    assert words[words.index("--speculative-algorithm") + 1] == "UNO"
    assert words[words.index("--uno-lora-path") + 1] == str(tmp_path / "one")
    assert words[words.index("--speculative-num-draft-tokens") + 1] == "5"
    assert words[words.index("--model-path") + 1] == "org/target"
    compile(export("hf", folder, tmp_path / "two").command, "command", "exec")


@pytest.mark.parametrize(
    ("engine", "kind", "match"),
    [
        ("sglang", "late", "slots that enter at layer 1 .* a sampler head, a draft vocabulary"),
        ("vllm", "late", "slots that enter at layer 1"),
        ("hf", "late", "PEFT would load its low-rank updates and draft nonsense"),
        ("sglang", "mask", "corruption=uniform"),
        ("vllm", "uniform", "train a DFlash drafter"),
        ("speculators", "mask", "train a DFlash drafter"),
    ],
)
def test_what_would_not_draft_there_is_refused(
    engine: str, kind: str, match: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path / "adapter", kind)
    with pytest.raises(ConfigError, match=match):
        export(engine, folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_peft_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    folder = saved(tmp_path / "adapter", "uniform")
    (folder / "draft_config.json").unlink()
    with pytest.raises(ConfigError, match="PEFT adapter already"):
        export("sglang", folder, tmp_path / "out")


def test_an_exported_adapter_drafts_the_same(tmp_path: Path) -> None:
    backbone = tiny_backbone()
    folder = saved(tmp_path / "adapter", "uniform")
    done = export("sglang", folder, tmp_path / "out")
    found = []
    for path in (folder, done.folder):
        adapter = load_adapter(backbone, path)
        ours = HybridDecoder(backbone, adapter=adapter, drafter="self-diffusion")
        results = [ours.generate(p, max_new_tokens=16) for p in random_prompts(5, 9)]
        found.append([(r.token_ids, r.stats.acceptance_histogram) for r in results])
    assert found[0] == found[1]
