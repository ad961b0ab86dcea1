"""Runs: resumed as if never killed, refused early, harmless to the target, and they learn."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hybrid import HybridDecoder
from hybrid.errors import CheckpointError, ConfigError
from hybrid.training.self_diffusion import trainer
from hybrid.training.checkpoint import read_metrics
from hybrid.training.self_diffusion.trainer import learning_rate, train_self_diffusion

Make = Callable[..., Any]


def losses(folder: Path) -> list[tuple[int, float, float]]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in read_metrics(folder)]


def adapter_bytes(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in (folder / "adapter").iterdir() if p.suffix != ".md"}


class KilledError(Exception):
    pass


def kill_at(step: int) -> Callable[[dict[str, Any]], None]:
    def report(row: dict[str, Any]) -> None:
        if row["step"] == step:
            raise KilledError

    return report


@pytest.mark.parametrize("step", [2, 4, 7, 10], ids="step{}".format)
@pytest.mark.parametrize("keep_contexts", [False, True], ids=["computed", "kept"])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    make_config: Make, step: int, keep_contexts: bool
) -> None:
    whole, cut = make_config("whole"), make_config("cut", keep_contexts=keep_contexts)
    train_self_diffusion(whole)
    with pytest.raises(KilledError):
        train_self_diffusion(cut, kill_at(step))
    assert not (cut.output / "adapter").exists()
    train_self_diffusion(cut)
    assert losses(cut.output) == losses(whole.output)
    assert len(losses(whole.output)) == 10
    assert adapter_bytes(cut.output) == adapter_bytes(whole.output)
    seconds = [row["seconds"] for row in read_metrics(cut.output)]
    assert seconds == sorted(seconds), "the clock goes on"


_CHILD = """
import sys, torch
from hybrid.training.self_diffusion.config import SelfDiffusionConfig
from hybrid.training.self_diffusion.trainer import train_self_diffusion
torch.set_num_threads(int(sys.argv[2]))
train_self_diffusion(
    SelfDiffusionConfig.model_validate_json(sys.argv[1]),
    lambda row: print(row["step"], flush=True),
)
"""


@pytest.mark.slow
def test_kill_9_and_resume(make_config: Make) -> None:
    """A real SIGKILL at whatever the process is doing then."""
    whole, cut = make_config("whole", steps=60), make_config("cut", steps=60)
    args = [sys.executable, "-c", _CHILD, cut.model_dump_json(), str(torch.get_num_threads())]
    with subprocess.Popen(args, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if int(line) >= 6:
                os.kill(child.pid, signal.SIGKILL)
                break
    assert child.returncode == -signal.SIGKILL
    assert (cut.output / "checkpoint.pt").is_file()
    assert not (cut.output / "adapter").exists()
    for config in (whole, cut):
        train_self_diffusion(config)
    assert losses(cut.output) == losses(whole.output)
    assert adapter_bytes(cut.output) == adapter_bytes(whole.output)


def test_ctrl_c_saves_the_step(make_config: Make) -> None:
    config, steps = make_config(), []

    def report(row: dict[str, Any]) -> None:
        steps.append(row["step"])
        if steps == [1, 2, 3]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_self_diffusion(config, report)
    train_self_diffusion(config, report)
    assert steps == list(range(1, 11))


def test_a_finished_run_is_not_run_again(make_config: Make) -> None:
    config = make_config()
    random_state = torch.get_rng_state()
    train_self_diffusion(config)
    assert torch.equal(torch.get_rng_state(), random_state), (
        "the caller's random state is left alone"
    )
    before = adapter_bytes(config.output)
    train_self_diffusion(config, kill_at(10))
    assert adapter_bytes(config.output) == before


def test_what_changes_nothing_may_change_between_two_starts(make_config: Make) -> None:
    with pytest.raises(KilledError):
        train_self_diffusion(make_config(), kill_at(5))
    train_self_diffusion(make_config(eval_every=5, keep_contexts=True))
    whole = make_config("whole")
    train_self_diffusion(whole)
    assert adapter_bytes(make_config().output) == adapter_bytes(whole.output)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"rank": 8}, r"holds a run with another rank \(4, now 8\)"),
        ({"seed": 1, "steps": 11}, r"steps \(10, now 11\), seed \(0, now 1\)"),
        ({"lines": "last"}, "data: .* has changed since the run"),
    ],
    ids=["rank", "seed-and-steps", "data"],
)
def test_refuses_the_folder_of_another_run(
    make_config: Make, chain_data: str, change: dict[str, Any], match: str
) -> None:
    config = make_config()
    train_self_diffusion(config)
    before = adapter_bytes(config.output)
    if "lines" in change:
        change = {"lines": chain_data[: chain_data.rindex('{"p"')]}
    with pytest.raises(ConfigError, match=match):
        train_self_diffusion(make_config(**change))
    assert adapter_bytes(config.output) == before


@pytest.mark.parametrize("damage", ["empty", "truncated", "flipped", "another", "incomplete"])
def test_refuses_a_damaged_checkpoint(make_config: Make, damage: str) -> None:
    config = make_config()
    train_self_diffusion(config)
    path = config.output / "checkpoint.pt"
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
        train_self_diffusion(config)


def test_reads_a_checkpoint_from_before_newer_fields(make_config: Make) -> None:
    config = make_config()
    with pytest.raises(KilledError):
        train_self_diffusion(config, kill_at(5))
    path = config.output / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    del state["config"]["device"], state["data_sha256"]
    torch.save(state, path)
    steps = []
    train_self_diffusion(config, lambda row: steps.append(row["step"]))
    assert steps[0] == 5, "from the checkpoint of step 4"


def test_a_full_disk_leaves_the_last_checkpoint(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, real = make_config(), torch.save

    def full(state: Any, path: Path) -> None:
        if state["step"] == 8:
            Path(path).write_bytes(b"half of it")
            raise OSError(28, "No space left on device")
        real(state, path)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt cannot be written: .*No space left"):
        train_self_diffusion(config)
    assert torch.load(config.output / "checkpoint.pt", weights_only=True)["step"] == 4
    assert not list(config.output.glob("*.part"))
    monkeypatch.undo()
    train_self_diffusion(config)
    whole = make_config("whole")
    train_self_diffusion(whole)
    assert losses(config.output) == losses(whole.output)
    assert adapter_bytes(config.output) == adapter_bytes(whole.output)


def test_an_output_that_is_a_file_is_refused(make_config: Make) -> None:
    config = make_config()
    config.output.write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot be written"):
        train_self_diffusion(config)


def test_metrics_survive_a_line_that_was_cut(make_config: Make) -> None:
    config = make_config()
    with pytest.raises(KilledError):
        train_self_diffusion(config, kill_at(4))
    with (config.output / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    train_self_diffusion(config)
    assert [row["step"] for row in read_metrics(config.output)] == list(range(1, 11))
    for line in (config.output / "metrics.jsonl").read_text().splitlines():
        json.loads(line)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"num_eval_sequences": 48}, r"got 48 examples, expected more than .* \(48\)"),
        ({"entry_layer": 2}, "entry_layer: got 2, expected 1 to 1"),
        ({"feature_layers": (5,)}, "feature_layers: got"),
        ({"max_length": 10}, r"data.jsonl line 1: got 23 tokens, expected at most 10"),
        ({"lines": '{"p": [1], "r": [2, 3]}\n{"p": [1], "r": [2, 99]}'}, "line 2: got 99"),
    ],
)
def test_refuses_what_cannot_be_trained(
    make_config: Make, fields: dict[str, Any], match: str
) -> None:
    config = make_config(**fields)
    with pytest.raises(ConfigError, match=match):
        train_self_diffusion(config)
    assert not config.output.exists()


def test_missing_data_is_refused_before_the_model_is_fetched(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    config.data.unlink()
    monkeypatch.setattr(trainer, "load_model", lambda *_, **__: pytest.fail("fetched the model"))
    with pytest.raises(ConfigError, match="data: .* cannot be read: No such file"):
        train_self_diffusion(config)


def test_a_loss_that_is_no_number_stops_the_run(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, real = make_config(), trainer.draft_loss
    with pytest.raises(KilledError):
        train_self_diffusion(config, kill_at(5))
    monkeypatch.setattr(trainer, "draft_loss", lambda *args: real(*args) * float("nan"))
    with pytest.raises(ConfigError, match="the loss is nan at step 5"):
        train_self_diffusion(config)
    assert torch.load(config.output / "checkpoint.pt", weights_only=True)["step"] == 4


def test_several_sequences_per_step_are_averaged(make_config: Make) -> None:
    one, two = make_config("one"), make_config("two", sequences_per_step=2)
    for config in (one, two):
        train_self_diffusion(config)
    first = losses(one.output)[0], losses(two.output)[0]
    assert first[0] != first[1]
    assert first[1][1] == pytest.approx(first[0][1], rel=0.5)


def test_learning_rate_warms_up_and_falls_to_zero(make_config: Make) -> None:
    config = make_config(steps=100, warmup_steps=10, learning_rate=1.0)
    rates = [learning_rate(config, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == pytest.approx(1 - 0.09)
    assert rates[50] == pytest.approx(0.5)
    assert 0 < rates[99] < 0.011
    assert max(rates) == rates[9]


def test_target_is_untouched_and_the_loss_falls(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []
    real = trainer.load_model
    monkeypatch.setattr(
        trainer, "load_model", lambda *a, **k: loaded.append(real(*a, **k)) or loaded[-1]
    )
    config = make_config(steps=80, eval_every=80, anchors_per_sequence=16)
    train_self_diffusion(config)
    assert len(loaded) == 1
    used, fresh = loaded[0].backbone, real(config.model, dtype="bfloat16").backbone
    pairs = [(used.embedding, fresh.embedding), (used.norm, fresh.norm)]
    pairs.append((used.head.weight, fresh.head.weight))
    for ours, theirs in zip(used.layers, fresh.layers, strict=True):
        pairs += [(getattr(ours, n), getattr(theirs, n)) for n in ("input_norm", "post_norm")]
        for name in ("qkv", "o", "gate_up", "down"):
            pairs.append((getattr(ours, name).weight, getattr(theirs, name).weight))
    assert all(torch.equal(a, b) for a, b in pairs)
    curve = [loss for _, loss, _ in losses(config.output)]
    assert sum(curve[-10:]) < 0.4 * sum(curve[:10])


def test_a_fitted_adapter_drafts_long_and_loses_nothing(make_config: Make) -> None:
    config = make_config(steps=80, num_draft_tokens=6, anchors_per_sequence=16)
    folder = train_self_diffusion(config)
    rows = [row for row in read_metrics(config.output) if "accuracy_by_position" in row]
    assert rows[-1]["expected_acceptance_length"] > 4
    assert len(rows[-1]["accuracy_by_position"]) == 6
    for dtype in ("float32", "bfloat16"):
        decoder = HybridDecoder.from_pretrained(config.model, dtype=dtype, adapter=folder)
        prompts = [[2, 1], [7], [31, 30, 4], list(range(20))]
        for num_new in (1, 5, 6, 7, 40):
            plain = decoder.generate(prompts, strategy="ar", max_new_tokens=num_new)
            ours = decoder.generate(prompts, strategy="speculative", max_new_tokens=num_new)
            assert [r.token_ids for r in ours] == [r.token_ids for r in plain]
        assert sum(r.stats.acceptance_length for r in ours) / len(ours) > 2
        assert any(r.stats.acceptance_histogram[-1] > 0 for r in ours), "all six accepted"


def test_the_adapter_on_disk_is_what_was_trained(make_config: Make) -> None:
    config = make_config()
    folder = train_self_diffusion(config)
    state = torch.load(config.output / "checkpoint.pt", weights_only=True)["model"]
    saved = load_file(folder / "draft_model.safetensors")
    assert torch.equal(saved["slots"], state["slots"].bfloat16())
    assert saved["slots"].abs().max() > 0
