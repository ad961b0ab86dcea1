"""The d3llm recipe on a tiny model: it learns, its teacher stays, it can be resumed, exported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from recipe_checks import (
    check_card_names_a_hub_model_whole,
    check_card_shows_the_last_evaluation,
    check_evaluates_in,
    each_precision,
)
from transformers import AutoModelForCausalLM

from hybrid.errors import ConfigError
from hybrid.models.tiny import tiny_checkpoint
from hybrid.training import recipes
from hybrid.training.checkpoint import read_metrics
from hybrid.training.d3llm.config import D3LLMConfig
from hybrid.training.d3llm.recipe import D3LLMRecipe, build
from hybrid.training.loop import train
from hybrid.training.masked_diffusion import full_attention
from hybrid.training.trainable import Trainable, load_trainable
from hybrid.training.trajectory import Canvas, Trajectory, decode, most_confident

VOCAB, MASK = 24, 23
PROMPTS = [[a, b] for a in range(1, 4) for b in range(4, 8)]
PROMPTS += [[1, 8], [2, 8]]  # held out

Make = Callable[..., D3LLMConfig]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("diffusion")
    return tiny_checkpoint(
        path, vocab_size=VOCAB, hidden_size=32, num_layers=2, tokenizer=False, scale=1.0
    )


@pytest.fixture
def make(tmp_path: Path, folder: Path) -> Make:
    """A function that returns a short configuration."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"p": p, "r": [1, 2]}) + "\n" for p in PROMPTS))

    def config(output: str = "run", **fields: Any) -> D3LLMConfig:
        return D3LLMConfig(
            **{
                "data": data,
                "output": tmp_path / output,
                "model": str(folder),
                "mask_token_id": MASK,
                "response_length": 8,
                "block_size": 4,
                "window_sizes": (2, 4),
                "teacher_batch_size": 5,
                "rank": 4,
                "lora_alpha": 8.0,
                "steps": 40,
                "warmup_steps": 2,
                "learning_rate": 1e-2,
                "sequences_per_step": 2,
                "num_eval_sequences": 2,
                "num_decoded": 2,
                "eval_every": 20,
                "precision": "float32",
                **fields,
            }
        )

    return config


def weights(trainable: Trainable, *, trained: bool) -> dict[str, torch.Tensor]:
    return {
        name: p.detach().clone()
        for name, p in trainable.named_parameters()
        if p.requires_grad == trained
    }


def mean_loss(recipe: D3LLMRecipe) -> float:
    """Over the same 40 micro-batches, whatever was trained."""
    with torch.no_grad():
        return sum(float(recipe.module(recipe.batch(s, 0))["loss"]) for s in range(40)) / 40


def test_the_trajectories_are_the_teachers_one_token_per_forward(make: Make, folder: Path) -> None:
    config = make()
    recipe = build(config)
    (path,) = config.output.glob("trajectories-*.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    canvas = Canvas(8, 4, MASK, 0)
    teacher = full_attention(load_trainable(folder), canvas)
    for prompt, row in zip(PROMPTS, rows, strict=True):
        (alone,) = decode(teacher, [prompt], canvas, most_confident([1] * 4))
        assert Trajectory(tuple(row["tokens"]), tuple(row["steps"])) == alone
        assert sorted(row["steps"]) == list(range(1, 9))
    before = path.stat().st_mtime_ns
    assert build(config).data_sha256 == recipe.data_sha256
    assert path.stat().st_mtime_ns == before  # decoded once


def test_a_model_that_was_trained_again_is_another_teacher(make: Make, tmp_path: Path) -> None:
    def model(seed: int) -> str:
        path = tmp_path / "again"
        tiny_checkpoint(path, vocab_size=VOCAB, num_layers=1, tokenizer=False, seed=seed)
        return str(path)

    train(build(make(model=model(0), steps=1)))
    (first,) = make().output.glob("trajectories-*.jsonl")
    again = build(make(model=model(1), steps=1))
    (second,) = set(make().output.glob("trajectories-*.jsonl")) - {first}
    assert second.read_text() != first.read_text()
    with pytest.raises(ConfigError, match="model: .*again has changed since the run"):
        train(again)


def test_several_tokens_per_forward_are_other_trajectories(make: Make) -> None:
    build(make())
    (other,) = make().output.glob("trajectories-*.jsonl")
    build(make(trajectory_steps=4))
    (path,) = set(make().output.glob("trajectories-*.jsonl")) - {other}
    for line in path.read_text().splitlines():
        assert sorted(json.loads(line)["steps"]) == [1, 1, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize("rank", [4, None])
def test_the_loss_falls(make: Make, rank: int | None) -> None:
    config = make(rank=rank, learning_rate=1e-2 if rank else 2e-3)
    recipe = build(config)
    before, held_out = mean_loss(recipe), recipe.evaluate()["held_out_loss"]
    train(recipe)
    assert mean_loss(recipe) < 0.75 * before
    rows = read_metrics(config.output)
    assert rows[-1]["held_out_loss"] < 0.9 * held_out  # of prompts that are new
    assert rows[-1].keys() >= {"tokens_per_forward", "agreement", "masked", "complement", "entropy"}


def test_the_entropy_threshold_decides_how_many_tokens_a_forward_commits(make: Make) -> None:
    metrics = build(make(entropy_threshold=0.0)).evaluate()
    assert metrics["tokens_per_forward"] == 1.0
    metrics = build(make(entropy_threshold=99.0)).evaluate()
    assert metrics["tokens_per_forward"] == 4.0  # whole blocks
    assert 0 <= metrics["agreement"] <= 1


def test_the_held_out_loss_is_the_mean_over_hidden_tokens(make: Make, folder: Path) -> None:
    config = make(block_size=8, window_sizes=(8,), mask_ratio_max=1e-6)
    found = build(config).evaluate()["held_out_loss"]  # only the last token is hidden
    (path,) = config.output.glob("trajectories-*.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()][-2:]
    model, losses = load_trainable(folder), []
    for prompt, row in zip(PROMPTS[-2:], rows, strict=True):
        last = row["steps"].index(8)
        ids = [*prompt, *row["tokens"]]
        ids[2 + last] = MASK
        mask = torch.ones(10, 10, dtype=torch.bool)
        with torch.no_grad():
            logits = model(torch.tensor([ids]), torch.arange(10), mask)[0, 2 + last]
        losses.append(-float(logits.log_softmax(dim=-1)[row["tokens"][last]]))
    assert found == pytest.approx(sum(losses) / 2, abs=2e-5)


def test_base_weights_and_teacher_are_bitwise_untouched(make: Make) -> None:
    recipe = build(make(steps=5))
    trainable = recipe.module.trainable
    ids, positions = torch.tensor([[1, 2, MASK, MASK]]), torch.arange(4)
    mask = torch.ones(4, 4, dtype=torch.bool)
    base, updates = weights(trainable, trained=False), weights(trainable, trained=True)
    logits = trainable.teacher(ids, positions, mask)
    assert torch.equal(trainable(ids, positions, mask), logits)
    train(recipe)
    assert torch.equal(trainable.teacher(ids, positions, mask), logits)
    assert not torch.equal(trainable(ids, positions, mask), logits)
    after = weights(trainable, trained=False)
    assert base.keys() == after.keys()
    assert all(torch.equal(base[name], after[name]) for name in base)
    trained = weights(trainable, trained=True)
    assert any(not torch.equal(updates[name], trained[name]) for name in updates)


def test_a_teacher_of_its_own_is_distilled_and_left_as_it_was(
    make: Make, folder: Path, tmp_path: Path
) -> None:
    other = tiny_checkpoint(
        tmp_path / "teacher", "qwen3", seed=3, vocab_size=VOCAB, num_layers=1, tokenizer=False
    )
    files = {p.name: p.read_bytes() for p in other.iterdir()}
    recipe = build(make(teacher=str(other), steps=5))
    batch = recipe.batch(0, 0)
    canvas = Canvas(8, 4, MASK, 0)
    prompt = batch.targets[:2].tolist()
    (trajectory,) = decode(
        full_attention(load_trainable(other), canvas), [prompt], canvas, most_confident([1] * 4)
    )
    assert tuple(batch.targets[2:].tolist()) == trajectory.tokens
    train(recipe)
    assert {p.name: p.read_bytes() for p in other.iterdir()} == files


def test_a_killed_run_ends_like_an_uninterrupted_one(make: Make) -> None:
    whole, cut = (make(name, steps=7, eval_every=3) for name in ("whole", "cut"))
    recipe = recipes.build("d3llm", whole)
    train(recipe)

    def stop(row: dict[str, Any]) -> None:
        if row["step"] == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(recipes.build("d3llm", cut), stop)
    again = recipes.build("d3llm", cut)
    train(again)
    rows = [[{**row, "seconds": 0} for row in read_metrics(c.output)] for c in (whole, cut)]
    assert rows[0] == rows[1]
    first, second = (weights(r.module.trainable, trained=True) for r in (recipe, again))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_batches_follow_the_curricula(make: Make) -> None:
    recipe = build(make())
    early = [recipe.batch(step, 0).masked for step in range(20)]
    late = [recipe.batch(step, 0).masked for step in range(20, 40)]
    assert all(int(m.any(dim=0).sum()) == 2 for m in early)
    assert all(int(m.any(dim=0).sum()) == 4 for m in late)
    # At the end the ratio is 0.8: of four tokens int(0.2 * 4) = 0 are visible.
    assert recipe.batch(39, 0).masked[0].sum() == 4


def test_a_batch_depends_on_step_and_index_alone(make: Make) -> None:
    recipe, other = build(make()), build(make(seed=1))
    ids = [recipe.batch(step, index).input_ids for step in range(10) for index in range(2)]
    again = [recipe.batch(step, index).input_ids for step in range(10) for index in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(ids, again, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(ids[::2], ids[1::2], strict=True))
    assert any(not torch.equal(ids[2 * s], other.batch(s, 0).input_ids) for s in range(10))


def test_every_block_of_every_training_sequence_comes_up(make: Make) -> None:
    recipe = build(make(steps=2000))
    batches = [recipe.batch(step, 0) for step in range(400)]
    seen = {(tuple(b.targets[:2].tolist()), int(b.masked.any(dim=0).nonzero()[0])) for b in batches}
    # 12 prompts and 4 windows of 2: each is missed with a probability of (1 - 1 / 48)^400 = 2e-4.
    assert seen == {(tuple(p), 2 + start) for p in PROMPTS[:-2] for start in (0, 2, 4, 6)}


@pytest.mark.parametrize("merge", [True, False])
def test_the_export_computes_what_was_trained(make: Make, folder: Path, merge: bool) -> None:
    config = make(steps=5, merge=merge, export_dtype="float32")
    recipe = build(config)
    path = train(recipe)
    assert path.name == ("model" if merge else "adapter")
    if merge:
        assert json.loads((path / "config.json").read_text())["mask_token_id"] == MASK
        model = AutoModelForCausalLM.from_pretrained(path)
    else:
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), path)
    ids, mask = torch.tensor([[1, 2, MASK]]), torch.ones(3, 3, dtype=torch.bool)
    with torch.no_grad():
        expected = recipe.module.trainable(ids, torch.arange(3), mask)
        found = model(input_ids=ids, attention_mask=mask[None, None]).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    card = (path / "README.md").read_text()
    assert f"id {MASK}" in card
    assert "tokens_per_forward" in card
    assert str(config.output.parent) not in card


@each_precision
def test_evaluates_in_the_precision_that_it_trains_in(
    make: Make, precision: str, dtype: torch.dtype
) -> None:
    recipe = build(make(precision=precision))
    check_evaluates_in(dtype, recipe, recipe.module.trainable.model, lambda out: out.logits)


def test_the_card_shows_the_last_evaluation_and_makes_none(make: Make) -> None:
    names = ("held_out_loss", "tokens_per_forward", "agreement")
    check_card_shows_the_last_evaluation(build(make(steps=2, eval_every=1)), names)


def test_the_card_names_a_hub_model_whole(make: Make) -> None:
    check_card_names_a_hub_model_whole(build(make(steps=1)), teacher="some/teacher")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mask_token_id": None}, "mask_token_id: got None"),
        ({"mask_token_id": VOCAB}, f"from 0 to {VOCAB - 1}"),
        ({"mask_token_id": 2}, "example 1 answers with the mask token 2"),
        ({"max_length": 9}, "response_length: the longest prompt has 2 tokens"),
        ({"num_eval_sequences": 14}, "more than num_eval_sequences"),
        ({"targets": ("nope",)}, "targets"),
    ],
)
def test_bad_input_is_refused_early(make: Make, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(make(**fields))


def test_a_teacher_of_another_vocabulary_is_refused(make: Make, tmp_path: Path) -> None:
    other = tiny_checkpoint(tmp_path / "teacher", vocab_size=30, num_layers=1, tokenizer=False)
    with pytest.raises(ConfigError, match="vocabulary of 30"):
        build(make(teacher=str(other)))
