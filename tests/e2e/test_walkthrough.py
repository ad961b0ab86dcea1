"""The three commands of docs/training.md, as they stand there: from prompts to fewer passes."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from pages import FENCE, read_blocks, read_commands, run_command, run_python
from repository import ROOT

from hybrid import HybridDecoder
from hybrid.training.self_diffusion.config import SelfDiffusionConfig

PAGE = ROOT / "docs" / "training.md"
SECTION = "Three commands"
# The tiny model repeats itself, so even an adapter after one step gets 1.95; what is learned is 3.
LEARNED = 2.5

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Walk:
    """What was run, where, and what the last command measured."""

    folder: Path
    commands: list[str]
    rows: dict[str, dict[str, Any]]  # by strategy


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    """Make the checkpoint and the prompts, then run the three commands."""
    folder = tmp_path_factory.mktemp("walkthrough")
    text = PAGE.read_text(encoding="utf-8")
    section = re.search(rf"^## {SECTION}$.*?^## ", text, re.MULTILINE | re.DOTALL)
    assert section is not None, f"{PAGE.name} has no section {SECTION!r}"
    preparation, block, *_ = read_blocks(section.group())
    here = Path.cwd()
    os.chdir(folder)
    try:
        run_python(preparation, PAGE, {})
    finally:
        os.chdir(here)
    commands = read_commands(block.code)
    outputs = [run_command(command, folder, PAGE.name) for command in commands]
    measured = json.loads(outputs[-1].splitlines()[-1])
    return Walk(folder, commands, {row["strategy"]: row for row in measured["rows"]})


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_they_are_three(walk: Walk) -> None:
    names = [command.split()[1:3] for command in walk.commands]
    assert names[:2] == [["data", "generate"], ["train", "self-diffusion"]]
    assert [name[0] for name in names[2:]] == ["bench"]


def test_every_prompt_got_an_answer_and_none_is_measured(walk: Walk) -> None:
    asked = [row["prompt"] for row in _lines(walk.folder / "prompts.jsonl")]
    assert [row["prompt"] for row in _lines(walk.folder / "answers.jsonl")] == asked
    new = {row["prompt"] for row in _lines(walk.folder / "new-prompts.jsonl")}
    assert new
    assert new.isdisjoint(asked)


def test_held_out_acceptance_is_learned_and_reads_as_the_page_says(walk: Walk) -> None:
    rows = _lines(walk.folder / "run" / "metrics.jsonl")
    lengths = [r["expected_acceptance_length"] for r in rows if "acceptance_by_position" in r]
    assert lengths[-1] >= LEARNED
    last = rows[-1]
    assert last["expected_acceptance_length"] == pytest.approx(
        1 + sum(last["acceptance_by_position"]), abs=1e-3
    )


def test_new_prompts_take_fewer_passes_and_get_the_tokens_of_ar(walk: Walk) -> None:
    ar, speculative = walk.rows["ar"], walk.rows["speculative"]
    assert speculative["drafter"] == "self-diffusion"
    assert speculative["acceptance_length"] >= LEARNED
    assert speculative["greedy_match"] is True
    assert LEARNED * speculative["forwards"]["verify"] <= ar["forwards"]["verify"]


def test_the_adapter_serves_python_too(walk: Walk) -> None:
    decoder = HybridDecoder.from_pretrained(
        walk.folder / "my-model", dtype="float32", adapter=walk.folder / "run" / "adapter"
    )
    prompts = [
        [{"role": "user", "content": row["prompt"]}]
        for row in _lines(walk.folder / "new-prompts.jsonl")
    ]
    drafted = decoder.generate(prompts, max_new_tokens=64)
    expected = decoder.generate(prompts, max_new_tokens=64, strategy="ar")
    assert [r.token_ids for r in drafted] == [r.token_ids for r in expected]
    num_tokens = sum(len(r.token_ids) for r in drafted)
    assert sum(r.stats.num_verify_forwards for r in drafted) <= num_tokens / 2


def test_the_settings_that_the_page_shows_exist() -> None:
    blocks = FENCE.finditer(PAGE.read_text(encoding="utf-8"))
    shown = [yaml.safe_load(b.group(3)) for b in blocks if b.group(1) == "yaml"]
    assert shown
    for values in shown:
        assert SelfDiffusionConfig(**values).num_draft_tokens > 1
