"""Runs of a toy: resumed as if never killed, intact whatever fails, refused early."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toy_recipe import (
    KilledError,
    ToyConfig,
    ToyRecipe,
    assert_same_run,
    child,
    curve,
    kill_at,
    numbers,
    toy,
)

from hybrid.errors import CheckpointError, ConfigError
from hybrid.models.tiny import tiny_checkpoint
from hybrid.training.checkpoint import model_sha256, only_run_in, read_metrics
from hybrid.training.loop import train

Make = Callable[..., ToyRecipe]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return partial(toy, tmp_path)


@pytest.mark.parametrize("step", [2, 4, 7, 10], ids="step{}".format)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(make: Make, step: int) -> None:
    whole, cut, rest = (
        make("whole", dropout=0.5),
        make("cut", dropout=0.5),
        make("cut", dropout=0.5),
    )
    train(whole)
    with pytest.raises(KilledError):
        train(cut, kill_at(step))
    assert not (cut.config.output / "result").exists()
    steps: list[int] = []
    folder = train(rest, lambda row: steps.append(row["step"]))
    assert folder == cut.config.output / "result"
    assert steps == list(range(step // 4 * 4 + 1 if step < 10 else 11, 11))
    assert_same_run(whole, rest)
    seconds = [row["seconds"] for row in read_metrics(cut.config.output)]
    assert seconds == sorted(seconds), "the clock goes on"


@pytest.mark.slow
def test_kill_9_and_resume(make: Make) -> None:
    """A real SIGKILL at whatever the process is doing then."""
    fields = {"steps": 400, "eval_every": 20, "dropout": 0.5}
    whole, cut = make("whole", **fields), make("cut", **fields)
    with child(cut.config, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if int(line) >= 70:
                os.kill(run.pid, signal.SIGKILL)
                break
    assert run.returncode == -signal.SIGKILL
    assert torch.load(cut.config.output / "checkpoint.pt", weights_only=True)["step"] >= 60
    assert not (cut.config.output / "result").exists()
    for recipe in (whole, cut):
        train(recipe)
    assert_same_run(whole, cut)


def test_ctrl_c_saves_the_step(make: Make) -> None:
    steps: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        train(make(), kill_at(3, KeyboardInterrupt))
    train(make(), lambda row: steps.append(row["step"]))
    assert steps == list(range(4, 11))


def test_a_finished_run_is_not_run_again(make: Make) -> None:
    recipe = make(dropout=0.5)
    random_state = torch.get_rng_state()
    train(recipe)
    assert torch.equal(torch.get_rng_state(), random_state), (
        "the caller's random state is left alone"
    )
    before = numbers(recipe), curve(recipe)
    again = make(dropout=0.5)
    train(again, lambda row: pytest.fail("ran a step"))
    assert (numbers(again), curve(again)) == before


def test_checkpoints_hold_what_is_trained_and_nothing_else(make: Make) -> None:
    recipe = make()
    train(recipe)
    state = torch.load(recipe.config.output / "checkpoint.pt", weights_only=True)
    assert set(state["model"]) == {"weight", "bias", "first"}
    assert (state["step"], state["data_sha256"]) == (10, "of-the-toy")
    assert state["config"]["learning_rate"] == 0.1


def test_what_changes_nothing_may_change_between_two_starts(make: Make) -> None:
    with pytest.raises(KilledError):
        train(make(), kill_at(5))
    train(make(eval_every=5, keep_contexts=True, device="cpu"))
    whole = make("whole")
    train(whole)
    assert numbers(make()) == numbers(whole)


class OtherConfig(ToyConfig):
    pass


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"dropout": 0.5}, r"holds a run with another dropout \(0\.0, now 0\.5\)"),
        ({"seed": 1, "steps": 11}, r"steps \(10, now 11\), seed \(3, now 1\)"),
        ({"data_sha256": "of-others"}, "data: .* has changed since the run"),
        ({"recipe": OtherConfig}, r"another recipe \(ToyConfig, now OtherConfig\)"),
    ],
    ids=["recipe-field", "seed-and-steps", "data", "recipe"],
)
def test_refuses_the_folder_of_another_run(make: Make, change: dict[str, Any], match: str) -> None:
    first = make()
    train(first)
    before = numbers(first)
    fields = {k: v for k, v in change.items() if k not in {"data_sha256", "recipe"}}
    other = make(**fields)
    other.data_sha256 = change.get("data_sha256", other.data_sha256)
    other.config = change.get("recipe", ToyConfig)(**other.config.model_dump())
    with pytest.raises(ConfigError, match=match):
        train(other)
    assert numbers(first) == before


def test_refuses_another_model_by_the_same_name(make: Make, tmp_path: Path) -> None:
    def target(seed: int) -> str:
        return str(tiny_checkpoint(tmp_path / "model", num_layers=1, hidden_size=16, seed=seed))

    train(make(model=target(0)))
    with pytest.raises(ConfigError, match="model: .*model has changed since the run in .*same mod"):
        train(make(model=target(1)))
    train(make(model=target(0)))


def test_a_model_is_known_by_what_it_holds(tmp_path: Path) -> None:
    folder, weights = tmp_path / "one", bytearray(16 << 20)
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text("{}")
    first = model_sha256(str(folder))
    (folder / "README.md").write_text("says nothing about it")
    assert model_sha256(str(folder)) == first
    assert model_sha256(str(folder.rename(tmp_path / "two"))) == first
    folder = tmp_path / "two"
    hashes = {first}
    for start in range(0, len(weights), 1 << 20):  # one matrix alone was trained
        changed = weights.copy()
        changed[start + 5000 : start + 15000] = bytes(range(250)) * 40
        (folder / "model.safetensors").write_bytes(changed)
        hashes.add(model_sha256(str(folder)))
    (folder / "model.safetensors").write_bytes(weights[:-1])
    hashes.add(model_sha256(str(folder)))
    (folder / "config.json").write_text("[]")
    hashes.add(model_sha256(str(folder)))
    hashes.add(model_sha256(str(folder / "model.safetensors")))  # a file, as a GGUF is
    assert len(hashes) == 1 + 16 + 3
    with pytest.raises(CheckpointError, match="not found"):
        model_sha256(str(tmp_path / "one"))


def test_refuses_a_folder_in_which_another_training_runs(make: Make) -> None:
    recipe = make()
    with only_run_in(recipe.config.output):
        with pytest.raises(ConfigError, match="another training runs in"):
            train(recipe)
        assert not (recipe.config.output / "metrics.jsonl").exists()
    train(recipe)


@pytest.mark.parametrize("damage", ["empty", "truncated", "flipped", "another", "incomplete"])
def test_refuses_a_damaged_checkpoint(make: Make, damage: str) -> None:
    recipe = make()
    train(recipe)
    path = recipe.config.output / "checkpoint.pt"
    content = path.read_bytes()
    if damage == "another":
        torch.save(torch.zeros(3), path)
    elif damage == "incomplete":
        state = torch.load(path, weights_only=True)
        del state["optimizer"]
        torch.save(state, path)
    else:
        half = len(content) // 2
        cut = {"empty": b"", "truncated": content[:half], "flipped": content[:half] + b"\0" * half}
        path.write_bytes(cut[damage])
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt cannot be read.*Remove it"):
        train(make())


@pytest.mark.parametrize("change", ["shape", "names"])
def test_refuses_a_checkpoint_of_another_module(make: Make, change: str) -> None:
    train(make())
    other = make()
    if change == "shape":  # one that would broadcast
        other.module.weight = nn.Parameter(torch.zeros(3, 4, dtype=torch.float64))
    else:
        other.module.first.requires_grad_(False)
    with pytest.raises(CheckpointError, match="the checkpoint does not fit this model"):
        train(other)


def test_reads_a_checkpoint_from_before_newer_fields(make: Make) -> None:
    recipe = make()
    with pytest.raises(KilledError):
        train(recipe, kill_at(5))
    path = recipe.config.output / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    del state["config"]["device"], state["config"]["merge"], state["recipe"]
    del state["data_sha256"], state["model_sha256"]
    torch.save(state, path)
    steps: list[int] = []
    train(make(), lambda row: steps.append(row["step"]))
    assert steps[0] == 5, "from the checkpoint of step 4"


def test_a_full_disk_leaves_the_last_checkpoint(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, real = make(), torch.save

    def full(state: Any, path: Path) -> None:
        if state["step"] == 8:
            Path(path).write_bytes(b"half of it")
            raise OSError(28, "No space left on device")
        real(state, path)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt cannot be written: .*No space left"):
        train(recipe)
    assert torch.load(recipe.config.output / "checkpoint.pt", weights_only=True)["step"] == 4
    assert not list(recipe.config.output.glob("*.part"))
    monkeypatch.undo()
    rest, whole = make(), make("whole")
    train(rest)
    train(whole)
    assert_same_run(whole, rest)


def test_an_output_that_is_a_file_is_refused(make: Make) -> None:
    recipe = make()
    recipe.config.output.write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot be written"):
        train(recipe)


def test_metrics_survive_a_line_that_was_cut(make: Make) -> None:
    with pytest.raises(KilledError):
        train(make(), kill_at(4))
    with (make().config.output / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    whole = make("whole")
    train(make())
    train(whole)
    assert_same_run(make(), whole)


def test_writes_what_tensorboard_reads(make: Make) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    recipe = make(tensorboard=True)
    with pytest.raises(KilledError):
        train(recipe, kill_at(6))
    train(make(tensorboard=True))
    events = loader.EventAccumulator(str(recipe.config.output / "tensorboard"))
    events.Reload()
    for name in ("loss", "learning_rate"):
        read = [(event.step, event.value) for event in events.Scalars(name)]
        written = [(row["step"], pytest.approx(row[name])) for row in curve(recipe)]
        assert read == written, "the steps after the checkpoint once only"
    assert [event.step for event in events.Scalars("accuracy_by_position/3")] == [4, 8, 10]
