"""Every mistake that a drafter's files can show is named, and a sound pair has none."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_pairs import DRAFTER, TARGET, copied, own, top
from safetensors.torch import load_file, save_file

from hybrid.errors import CheckpointError
from hybrid.export.export import ENGINES, export
from hybrid.pair.checks import Pair, check_pair
from hybrid.pair.finding import Finding, Level, has_problem

Change = Callable[[dict[str, Any]], Any]


def check(drafter: Path, target: Path = TARGET) -> dict[str, Finding]:
    """Return the findings by check, the first of each."""
    found: dict[str, Finding] = {}
    for finding in check_pair(Pair.read(target, drafter)):
        found.setdefault(finding.check, finding)
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_exported_is_sound(engine: str, tmp_path: Path) -> None:
    export(engine, DRAFTER, tmp_path / "out", target=str(TARGET))
    found = check(tmp_path / "out")
    assert {f.level for f in found.values()} == {Level.OK}, found
    assert found["layers"].text == "outputs of layers [1, 3] of 0 to 5"


def remove(*names: str) -> Change:
    return lambda config: [config.pop(name) for name in names]


def no_flag(**fields: Any) -> Change:
    def change(config: dict[str, Any]) -> None:
        del config["dflash_config"]["causal"]
        config.update(fields)

    return change


MIXED = ["full_attention", "sliding_attention"]
BROKEN: list[tuple[str, Level, Change, str]] = [
    ("layout", Level.PROBLEM, remove("dflash_config"), "no DFlash drafter"),
    ("layers", Level.PROBLEM, own(target_layer_ids=[-1, 1]), "one too low"),
    (
        "layers",
        Level.PROBLEM,
        own(target_layer_ids=[2, 6]),
        r"one too high, these would be \[1, 5\]",
    ),
    (
        "layers",
        Level.PROBLEM,
        own(target_layer_ids=[2, 5]),
        r"the target's last.*\[1, 4\] are meant",
    ),
    ("layers", Level.PROBLEM, top(aux_hidden_state_layer_ids=[1, 3]), r"it should be \[2, 4\]"),
    ("layers", Level.PROBLEM, top(num_target_layers=8), "a target of 8 layers, this one has 6"),
    ("layers", Level.NOTE, lambda c: c["dflash_config"].pop("target_layer_ids"), "name them"),
    ("mask token", Level.PROBLEM, own(mask_token_id=64), "not in the target's table of 64 rows"),
    ("mask token", Level.PROBLEM, own(mask_token_id=-1), "not in the target's table"),
    ("mask token", Level.PROBLEM, top(mask_token_id=7), "keep one"),
    ("mask token", Level.PROBLEM, own(mask_token_id=None), "names no mask_token_id"),
    ("rope", Level.NOTE, top(rope_theta=10000.0), "theta 10000, the target's is 500"),
    ("rope", Level.NOTE, top(rope_scaling={"rope_type": "linear", "factor": 2.0}), "'linear'"),
    ("rope", Level.PROBLEM, remove("rope_theta", "rope_scaling"), "no rope_theta is given"),
    ("rope", Level.PROBLEM, top(rope_interleaved=True), "rotates halves"),
    ("rope", Level.PROBLEM, top(partial_rotary_factor=0.5), "partial_rotary_factor"),
    ("causality", Level.PROBLEM, own(causal=True), "marked causal"),
    ("causality", Level.PROBLEM, top(is_causal=True), "marked causal"),
    ("causality", Level.NOTE, no_flag(), "nothing says that blocks are not causal"),
    ("causality", Level.PROBLEM, no_flag(layer_types=MIXED), "makes these sliding layers causal"),
    ("sizes", Level.PROBLEM, top(hidden_size=64), "hidden size 64, the target's is 48"),
    ("sizes", Level.PROBLEM, own(target_layer_ids=[1, 2, 3]), "3 features of 48 make"),
    ("vocabulary", Level.PROBLEM, top(vocab_size=100), "vocab_size 100, the target's is 64"),
    ("vocabulary", Level.PROBLEM, top(draft_vocab_size=32), "without the table d2t"),
    ("vocabulary", Level.NOTE, remove("vocab_size"), "vLLM assumes one: write 64"),
    ("block size", Level.PROBLEM, top(block_size=1), "expected at least 2"),
    ("dtype", Level.NOTE, top(dtype="float32"), "says float32, the weights are bfloat16"),
    ("windows", Level.NOTE, top(layer_types=MIXED, sliding_window=8), "V2_MODEL_RUNNER"),
]


@pytest.mark.parametrize(("name", "level", "change", "text"), BROKEN)
def test_a_broken_config_is_named(
    name: str, level: Level, change: Change, text: str, tmp_path: Path
) -> None:
    found = check(copied(DRAFTER, tmp_path / "broken", change))
    assert found[name].level is level
    assert re.search(text, found[name].text), found[name].text


SPECULATORS: list[tuple[str, Level, Change, str]] = [
    (
        "causality",
        Level.PROBLEM,
        top(sliding_window_non_causal=False),
        "makes every layer's blocks",
    ),
    ("layers", Level.PROBLEM, top(aux_hidden_state_layer_ids=[0, 2]), "one too low"),
    ("layers", Level.PROBLEM, top(aux_hidden_state_layer_ids=[2, 6]), "the target's last"),
    ("block size", Level.NOTE, top(block_size=5), "speculative_tokens is 7: blocks of 5"),
]


@pytest.mark.parametrize(("name", "level", "change", "text"), SPECULATORS)
def test_a_broken_speculator_is_named(
    name: str, level: Level, change: Change, text: str, tmp_path: Path
) -> None:
    export("speculators", DRAFTER, tmp_path / "whole", target=str(TARGET))
    found = check(copied(tmp_path / "whole", tmp_path / "broken", change))
    assert (found[name].level, text in found[name].text) == (level, True), found[name]


def test_a_head_of_its_own_is_named(tmp_path: Path) -> None:
    folder = copied(DRAFTER, tmp_path / "broken")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros(64, 48)
    save_file(tensors, folder / "model.safetensors")
    assert "brings lm_head.weight" in check(folder)["vocabulary"].text
    tensors["d2t"] = torch.zeros(32)
    save_file(tensors, folder / "model.safetensors")
    reduced = copied(folder, tmp_path / "reduced", top(draft_vocab_size=32))
    assert "of 32 tokens: vLLM computes it" in check(reduced)["vocabulary"].text


@pytest.mark.parametrize("name", ["eos_token_id", "pad_token_id", "bos_token_id"])
def test_a_mask_that_is_another_special_token_is_named(name: str, tmp_path: Path) -> None:
    target = copied(TARGET, tmp_path / "target", top(**{name: [3, 49]}))
    assert f"the target's {name}" in check(DRAFTER, target)["mask token"].text


def test_a_target_with_several_parts_is_read(tmp_path: Path) -> None:
    def nest(config: dict[str, Any]) -> None:
        parts = dict(config)
        config.clear()
        config.update(model_type="several", text_config=parts)

    found = check(DRAFTER, copied(TARGET, tmp_path / "target", nest))
    assert not has_problem([*found.values()])


def test_float16_beside_bfloat16_is_a_note(tmp_path: Path) -> None:
    target = copied(TARGET, tmp_path / "target", top(dtype="float16"))
    assert "vLLM runs the drafter in the target's" in check(DRAFTER, target)["dtype"].text


def test_what_is_no_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        check(tmp_path / "none")
