"""What a profile recognises a model and an adapter by."""

from __future__ import annotations

import re

import pytest
import torch
from fakes import RandomTarget, tiny_backbone

from hybrid.models.fingerprint import folder_fingerprint, model_fingerprint
from hybrid.models.hf import HFBackbone
from hybrid.models.tiny import tiny_checkpoint


def test_a_model_is_the_same_in_every_precision_and_under_every_name():
    found = {
        model_fingerprint(tiny_backbone("llama", dtype), name)
        for dtype in (torch.float32, torch.float64, torch.bfloat16)
        for name in ("a", "b")
    }
    assert len(found) == 1
    assert re.fullmatch("[0-9a-f]{16}", found.pop())


def test_other_weights_are_another_model():
    kinds = [("llama", {}), ("llama", {"seed": 1}), ("qwen3", {}), ("llama", {"vocab_size": 70})]
    found = [model_fingerprint(tiny_backbone(name, **fields), "model") for name, fields in kinds]
    assert len(set(found)) == len(kinds)


def test_a_fine_tuned_model_is_another_one():
    """Training moves the norms even where it freezes the embedding."""
    backbone = tiny_backbone(seed=12)
    before = model_fingerprint(backbone, "model")
    backbone.norm = backbone.norm * 1.01
    assert model_fingerprint(backbone, "model") != before


def test_a_model_whose_weights_are_not_at_hand_goes_by_its_name(tmp_path):
    path = tiny_checkpoint(tmp_path, "gpt2", tokenizer=False)
    for backbone in (RandomTarget(6), HFBackbone.from_path(path, "cpu", torch.float32)):
        assert model_fingerprint(backbone, "its name") == "its name"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "draft_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    return tmp_path


def test_an_adapter_is_its_weights_and_configurations_wherever_they_lie(folder, tmp_path_factory):
    before = folder_fingerprint(folder)
    (folder / "profile.json").write_text("{}")
    (folder / "README.md").write_text("about")
    assert folder_fingerprint(folder) == before
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for path in folder.iterdir():
        (elsewhere / path.name).write_bytes(path.read_bytes())
    assert folder_fingerprint(elsewhere) == before


@pytest.mark.parametrize("name", ["draft_config.json", "adapter_model.safetensors"])
def test_another_file_is_another_adapter(folder, name):
    before = folder_fingerprint(folder)
    (folder / name).write_text("other")
    changed = folder_fingerprint(folder)
    (folder / name).unlink()
    assert len({before, changed, folder_fingerprint(folder)}) == 3
