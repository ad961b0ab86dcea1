"""Checkpoints that bring `custom_generate`: loaded by transformers itself, offline."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from plug_models import prompts, random_network, save_random_adapter, tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel, dynamic_module_utils

from hybrid.errors import CheckpointError, ConfigError
from hybrid.plug import DFlashAssistant, carried, write_custom_generate

CALL = {**prompts(3), "max_new_tokens": 16, "do_sample": False}


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a saved model; code that it brings is copied below the test's folder."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])  # transformers appends the folder
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)
    tiny_model().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def plug_of(model: PreTrainedModel) -> Any:
    return vars(model)["_hybrid_plug"][1]


def test_a_loaded_model_generates_by_hybrid(checkpoint: Path, tmp_path: Path) -> None:
    want = tiny_model().generate(**CALL)
    DFlashAssistant.wrap(random_network(tiny_model())).save_pretrained(tmp_path / "drafter")
    written = {
        "ngram": {"drafter": "ngram", "strategy": "speculative"},
        "dflash": {"drafter": tmp_path / "drafter", "num_draft_tokens": 3},
        "combined": {"adapter": save_random_adapter(tmp_path / "adapter")},
    }
    for name, settings in written.items():
        folder = write_custom_generate(checkpoint, **settings)
        assert len((folder / "generate.py").read_text().splitlines()) < 25
        model = AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=True)
        assert torch.equal(model.generate(**CALL), want)
        first = plug_of(model)
        assert torch.equal(model.generate(CALL["input_ids"], **{**CALL, "input_ids": None}), want)
        assert plug_of(model) is first, "made once"
        assert first._parts.drafter_name == name
        assert all(row.num_new_tokens == 16 for row in first.stats)
        assert name == "ngram" or all(row.num_drafted > 0 for row in first.stats)


def test_without_trust_transformers_decodes_alone(checkpoint: Path) -> None:
    write_custom_generate(checkpoint, drafter="ngram")
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert torch.equal(model.generate(**CALL), tiny_model().generate(**CALL))
    assert "generate" not in vars(model)


def test_another_model_may_borrow_it_by_its_path(checkpoint: Path, tmp_path: Path) -> None:
    write_custom_generate(checkpoint, drafter="ngram")
    model, path = tiny_model(), str(checkpoint)
    want = model.generate(**CALL)
    got = model.generate(**CALL, custom_generate=path, trust_remote_code=True)
    assert torch.equal(got, want)
    assert "generate" not in vars(model)
    write_custom_generate(checkpoint, adapter=save_random_adapter(tmp_path / "adapter"))
    with pytest.raises(CheckpointError, match="Load the model from the checkpoint"):
        model.generate(**CALL, custom_generate=path, trust_remote_code=True)


def test_a_checkpoint_of_the_hub_is_fetched_at_its_commit(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fetch(name: str, revision: str | None) -> Path:
        asked.append((name, revision))
        return checkpoint

    monkeypatch.setattr(carried, "snapshot", fetch)
    write_custom_generate(checkpoint, adapter=save_random_adapter(tmp_path / "adapter"))
    model = tiny_model()
    model.config.name_or_path = model.name_or_path = "somebody/model"
    model.config._commit_hash = "abc"
    settings = {"adapter": "adapter"}
    got = carried.carried_generate(model, settings, **CALL)
    assert torch.equal(got, tiny_model().generate(**CALL))
    assert asked == [("somebody/model", "abc")]


def test_it_says_what_to_install(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_custom_generate(checkpoint, drafter="ngram")
    assert (folder / "requirements.txt").read_text().startswith("hybrid-decoder>=")
    monkeypatch.setitem(sys.modules, "hybrid.plug", None)  # as if it were not there
    with pytest.raises(ImportError, match="pip install hybrid-decoder"):
        runpy.run_path(str(folder / "generate.py"))


def test_what_is_no_folder_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        write_custom_generate(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="expected a folder"):
        write_custom_generate(checkpoint, adapter=tmp_path / "nothing")
    assert not (checkpoint / "custom_generate" / "generate.py").exists()
