"""docs/serving.md shows what `hybrid export` prints; its commands name models that are not here."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from dflash_pairs import DRAFTER
from repository import ROOT
from typer.testing import CliRunner

from hybrid.cli.main import app
from hybrid.models.draft_config import DraftConfig
from hybrid.training.self_diffusion.export import save_adapter

PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"^\$ hybrid (export .*)\n([^`$].*)$", PAGE, re.MULTILINE)


def test_the_page_shows_every_command_that_is_printed() -> None:
    engines = [shlex.split(command)[1] for command, _ in SHOWN]
    assert engines == ["vllm", "speculators", "sglang", "sglang"]


@pytest.mark.parametrize(("command", "printed"), SHOWN, ids=lambda text: text[:20])
def test_a_command_prints_what_the_page_shows(
    command: str, printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(DRAFTER, tmp_path / "run" / "dflash")
    config = DraftConfig(
        8, 0, (), rank=1, lora_alpha=1.0, base={}, train_norms=False, corruption="uniform"
    )
    tensors = {"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.zeros(1, 4)}
    save_adapter(tmp_path / "run" / "adapter", config, tensors, base_model="Qwen/Qwen3-8B")
    done = CliRunner().invoke(app, shlex.split(command))
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{printed}\n"
