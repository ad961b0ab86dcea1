"""The d2f recipe on a tiny model: it learns, its teacher stays, it can be resumed and exported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_checks import (
    check_card_names_a_hub_model_whole,
    check_card_shows_the_last_evaluation,
    check_evaluates_in,
    each_precision,
)
from transformers import AutoModelForCausalLM

from hybrid.errors import ConfigError
from hybrid.models.tiny import tiny_checkpoint
from hybrid.training import masks, recipes
from hybrid.training.checkpoint import read_metrics
from hybrid.training.d2f.config import D2FConfig
from hybrid.training.d2f.recipe import D2FRecipe, build
from hybrid.training.loop import train
from hybrid.training.masked_diffusion import block_causal
from hybrid.training.trainable import Trainable
from hybrid.training.trajectory import Canvas, confidence_above, decode

VOCAB, MASK = 24, 23
DRAW = torch.Generator().manual_seed(0)
EXAMPLES = [
    {"p": [a, b], "r": torch.randint(22, (5 + a,), generator=DRAW).tolist()}
    for a in range(1, 4)
    for b in range(4, 8)
]

Make = Callable[..., D2FConfig]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("diffusion")
    return tiny_checkpoint(
        path, "qwen3", vocab_size=VOCAB, hidden_size=32, num_layers=2, tokenizer=False
    )


@pytest.fixture
def make(tmp_path: Path, folder: Path) -> Make:
    """A function that returns a short configuration."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in EXAMPLES))

    def config(output: str = "run", **fields: Any) -> D2FConfig:
        return D2FConfig(
            **{
                "data": data,
                "output": tmp_path / output,
                "model": str(folder),
                "mask_token_id": MASK,
                "block_size": 4,
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


def mean_excess(recipe: D2FRecipe) -> float:
    """The loss less what no student can do better than: the teacher's own entropy."""
    trainable = recipe.module.trainable
    total = 0.0
    with torch.no_grad():
        for step in range(40):
            batch = recipe.batch(step, 0)
            length = len(batch.blocks)
            logits = trainable.teacher(batch.input_ids, torch.arange(length), masks.full(length))
            entropy = torch.distributions.Categorical(logits=logits[0]).entropy()
            least = (entropy / batch.mask_ratio)[batch.masked].mean()
            total += float(recipe.module(batch)["loss"] - least) / 40
    return total


@pytest.mark.parametrize("rank", [4, None])
def test_the_student_approaches_its_teacher(make: Make, rank: int | None) -> None:
    config = make(rank=rank, learning_rate=1e-2 if rank else 2e-3)
    recipe = build(config)
    before = mean_excess(recipe)
    train(recipe)
    assert 0 < mean_excess(recipe) < 0.75 * before
    row = read_metrics(config.output)[-1]
    assert row.keys() >= {"held_out_loss", "tokens_per_forward", "agreement"}


@pytest.mark.parametrize("rank", [4, None])
def test_the_teacher_is_bitwise_untouched(make: Make, rank: int | None) -> None:
    recipe = build(make(steps=5, rank=rank))
    trainable = recipe.module.trainable
    ids, positions = torch.tensor([[1, 2, MASK, MASK]]), torch.arange(4)
    base, logits = (
        weights(trainable, trained=False),
        trainable.teacher(ids, positions, masks.full(4)),
    )
    assert torch.equal(trainable(ids, positions, masks.full(4)), logits)
    train(recipe)
    assert torch.equal(trainable.teacher(ids, positions, masks.full(4)), logits)
    assert not torch.equal(trainable(ids, positions, masks.full(4)), logits)
    after = weights(trainable, trained=False)
    assert base.keys() == after.keys()
    assert all(torch.equal(base[name], after[name]) for name in base)


def test_only_the_student_has_a_gradient(make: Make) -> None:
    recipe = build(make())
    recipe.module(recipe.batch(0, 0))["loss"].backward()
    for name, parameter in recipe.module.named_parameters():
        assert (parameter.grad is not None) == ("lora_" in name), name


def test_an_evaluation_decodes_block_by_block(make: Make) -> None:
    recipe = build(make(confidence_threshold=0.0))
    held_out = EXAMPLES[-2:]  # responses of 8 tokens: two blocks, one forward each
    found = []
    for row in held_out:
        canvas = Canvas(8, 4, MASK, 0)
        denoise = block_causal(recipe.module.trainable, canvas)
        found += decode(denoise, [row["p"]], canvas, confidence_above(0.0))
    same = sum(
        a == b
        for t, row in zip(found, held_out, strict=True)
        for a, b in zip(t.tokens, row["r"], strict=True)
    )
    metrics = recipe.evaluate()
    assert metrics["tokens_per_forward"] == 4.0
    assert metrics["agreement"] == round(same / 16, 4)
    assert recipe.evaluate() == metrics
    assert build(make(confidence_threshold=1.0)).evaluate()["tokens_per_forward"] == 1.0


def test_the_held_out_loss_is_that_of_the_module(make: Make) -> None:
    recipe = build(make(block_size=16, mask_ratio_min=1.0, mask_ratio_max=1.0))
    losses = []
    for row in EXAMPLES[-2:]:  # everything is masked, so nothing is left to chance
        ids = torch.tensor([[*row["p"], *[MASK] * len(row["r"])]])
        length = ids.shape[1]
        blocks = masks.block_causal(masks.block_ids(length, 16, 2))
        trainable = recipe.module.trainable
        with torch.no_grad():
            probs = trainable.teacher(ids, torch.arange(length), masks.full(length))[0, 2:].softmax(
                -1
            )
            student = trainable(ids, torch.arange(length), blocks)[0, 2:].log_softmax(-1)
        losses.append(float(-(probs * student).sum(-1).mean()))
    assert recipe.evaluate()["held_out_loss"] == pytest.approx(sum(losses) / 2, abs=2e-5)


def test_a_killed_run_ends_like_an_uninterrupted_one(make: Make) -> None:
    whole, cut = (make(name, steps=7, eval_every=3) for name in ("whole", "cut"))
    recipe = recipes.build("d2f", whole)
    train(recipe)

    def stop(row: dict[str, Any]) -> None:
        if row["step"] == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(recipes.build("d2f", cut), stop)
    again = recipes.build("d2f", cut)
    train(again)
    rows = [[{**row, "seconds": 0} for row in read_metrics(c.output)] for c in (whole, cut)]
    assert rows[0] == rows[1]
    first, second = (weights(r.module.trainable, trained=True) for r in (recipe, again))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_export_computes_what_was_trained(make: Make) -> None:
    config = make(steps=5, export_dtype="float32")
    recipe = build(config)
    path = train(recipe)
    model = AutoModelForCausalLM.from_pretrained(path)
    ids, mask = torch.tensor([[1, 2, MASK]]), masks.full(3)
    with torch.no_grad():
        expected = recipe.module.trainable(ids, torch.arange(3), mask)
        found = model(input_ids=ids, attention_mask=mask[None, None]).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    fields = json.loads((path / "config.json").read_text())
    assert (fields["mask_token_id"], fields["block_size"], fields["logit_shift"]) == (MASK, 4, 0)
    assert recipe.data_sha256 in (path / "README.md").read_text()


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
    check_card_names_a_hub_model_whole(build(make(steps=1)))


def test_bad_input_is_refused_early(make: Make) -> None:
    with pytest.raises(ConfigError, match="mask_token_id: got None"):
        build(make(mask_token_id=None))
    with pytest.raises(ConfigError, match="example 1 answers with the mask token"):
        build(make(mask_token_id=EXAMPLES[0]["r"][0]))
