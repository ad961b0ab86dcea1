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
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hybrid import HybridDecoder
from hybrid.errors import ConfigError
from hybrid.models.tiny import tiny_checkpoint
from hybrid.training import recipes
from hybrid.training.checkpoint import read_metrics
from hybrid.training.joint.config import JointConfig
from hybrid.training.joint.recipe import build, draw_noise
from hybrid.training.loop import train
from hybrid.training.masks import block_ids

MASK, CYCLE = 30, 7
BEGINNINGS = ([20, 21], [21], [21, 20], [21, 21])  # of prompts; the last is held out
MakeConfig = Callable[..., JointConfig]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"), num_layers=2, vocab_size=32, scale=0.7, tokenizer=False
    )


@pytest.fixture
def make(tmp_path: Path, tiny: Path) -> MakeConfig:
    """A function that returns a short configuration; the responses count around a cycle."""

    def config(output: str = "run", **fields: Any) -> JointConfig:
        data = tmp_path / "data.jsonl"
        rows = [
            {
                "p": [*BEGINNINGS[n // CYCLE], start],
                "r": [(start + i) % CYCLE for i in range(1, 10 + n % 3)],
            }
            for n, start in enumerate([*range(CYCLE)] * 4)
        ]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return JointConfig(
            **{
                "data": data,
                "output": tmp_path / output,
                "model": str(tiny),
                "mask_token_id": MASK,
                "block_size": 4,
                "steps": 6,
                "warmup_steps": 1,
                "learning_rate": 5e-3,
                "num_eval_sequences": 7,
                "eval_every": 3,
                "precision": "float32",
                "export_dtype": "float32",
                "sequences_per_step": 2,
                **fields,
            }
        )

    return config


@pytest.mark.parametrize("lora", [{}, {"rank": 16, "learning_rate": 2e-2}], ids=["full", "lora"])
def test_it_learns_to_continue_and_to_fill(make: MakeConfig, lora: dict[str, Any]) -> None:
    recipe = build(make(steps=60, sequences_per_step=4, eval_every=60, **lora))
    before = recipe.evaluate()
    train(recipe)
    after = recipe.evaluate()
    assert after["eval_ar_loss"] < 0.2 * before["eval_ar_loss"]
    assert after["eval_diffusion_loss"] < 0.3 * before["eval_diffusion_loss"]
    assert before["expected_acceptance_length"] < 2 < 2.5 < after["expected_acceptance_length"]
    assert len(after["accuracy_by_position"]) == 3


def test_batches_follow_from_seed_step_and_index(make: MakeConfig) -> None:
    recipe, again = build(make()), build(make())
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first, same = recipe.batch(5, 1), again.batch(5, 1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.tokens, same.tokens)
    assert torch.equal(first.masked, same.masked)
    others = [recipe.batch(5, 0), recipe.batch(6, 1), build(make(seed=1)).batch(5, 1)]
    for other in others:
        assert not torch.equal(first.share[0, :9], other.share[0, :9])


def test_a_step_is_the_mean_over_its_tokens(make: MakeConfig) -> None:
    recipe = build(make(sequences_per_step=4))
    batches = [recipe.batch(2, index) for index in range(4)]
    counts = [len(batch.tokens) - batch.first for batch in batches]
    assert len(set(counts)) > 1
    assert {batch.num_tokens for batch in batches} == {sum(counts) / 4}
    means = [recipe.module(batch)["ar_loss"].item() for batch in batches]
    total = 0.0
    for batch in batches:
        logits = recipe.module.trainable.model(input_ids=batch.tokens[None]).logits[0]
        picked = torch.log_softmax(logits, -1)[:-1].gather(1, batch.tokens[1:, None])
        total -= picked[batch.first - 1 :].sum().item()
    assert sum(means) / 4 == pytest.approx(total / sum(counts), rel=1e-5)


def test_prompts_are_learned_on_request(make: MakeConfig) -> None:
    batch = build(make()).batch(0, 0)
    num_prompt = int((batch.tokens >= 20).sum()) + 1
    assert batch.first == num_prompt
    assert batch.blocks.tolist() == block_ids(len(batch.tokens), 4, num_prompt).tolist()
    batch = build(make(train_on="all")).batch(0, 0)
    assert batch.first == 1
    assert batch.blocks.tolist() == block_ids(len(batch.tokens), 4).tolist()


def test_noise_has_the_shares_that_it_says(make: MakeConfig) -> None:
    blocks, draw = block_ids(4000, 4, 100), torch.Generator().manual_seed(0)
    masked, share = draw_noise(make(min_noise=0.1), blocks, 100, draw)
    assert masked.shape == share.shape == (1, 4000)
    assert not masked[:, :100].any()
    assert (share[0, 1:] == share[0, :-1])[blocks[1:] == blocks[:-1]].all()
    assert share.min() < 0.11
    assert share.max() > 0.99
    # 975 blocks: the mean of U(0.1, 1) within five standard errors.
    assert share[0, 100::4].mean().item() == pytest.approx(0.55, abs=0.042)
    weights = (masked / share)[:, 100:]
    assert weights.mean().item() == pytest.approx(1, abs=0.1)  # unbiased
    _, share = draw_noise(make(noise="sequence"), blocks, 100, draw)
    assert share.unique().numel() == 1


def test_complements_mask_each_token_once(make: MakeConfig) -> None:
    blocks, draw = block_ids(400, 4, 100), torch.Generator().manual_seed(0)
    masked, share = draw_noise(make(complementary=True), blocks, 100, draw)
    assert masked.shape == (2, 400)
    assert (masked.sum(dim=0) == (torch.arange(400) >= 100)).all()
    assert torch.allclose(share.sum(dim=0), torch.ones(400, dtype=torch.float64))
    assert share.min() >= 1e-3
    batch = build(make(complementary=True)).batch(0, 0)
    assert batch.masked.shape[0] == 2


def test_blocks_beyond_the_context_are_not_measured(make: MakeConfig, tmp_path: Path) -> None:
    path = tiny_checkpoint(
        tmp_path / "short", vocab_size=32, tokenizer=False, max_position_embeddings=16
    )
    some = build(make(model=str(path), block_size=8)).evaluate()
    assert some["expected_acceptance_length"] >= 1
    none = build(make(model=str(path), block_size=20)).evaluate()
    assert none["expected_acceptance_length"] == 1
    assert none["accuracy_by_position"] == [0.0] * 19


@pytest.mark.parametrize("lora", [{}, {"rank": 4}], ids=["full", "lora"])
def test_the_export_decodes_alike_here_and_in_transformers(
    make: MakeConfig, lora: dict[str, Any]
) -> None:
    folder = train(build(make(**lora)))
    config = json.loads((folder / "config.json").read_text())
    assert config["mask_token_id"] == MASK
    assert config["block_size"] == 4
    assert config["dlm_paradigm"] == "block_diff"
    card = (folder / "README.md").read_text()
    assert "expected acceptance length" in card
    assert str(folder.parent) not in card
    ours = HybridDecoder.from_pretrained(folder, dtype="float32")
    assert ours.backbone.mask_token_id == MASK
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    for prompt in ([20, 21, 3], [21, 5], [9, 9, 9, 9]):
        answer = ours.generate([prompt], strategy="ar", max_new_tokens=12, temperature=0)[0]
        ids = torch.tensor([prompt])
        expected = theirs.generate(ids, max_new_tokens=12, do_sample=False)[0, len(prompt) :]
        assert list(answer.token_ids) == expected.tolist()


def test_an_adapter_is_exported_on_request(make: MakeConfig) -> None:
    folder = train(build(make(rank=2, targets=("q_proj",), merge=False)))
    assert folder.name == "adapter"
    names = load_file(folder / "adapter_model.safetensors")
    assert len(names) == 4
    assert f"(id {MASK})" in (folder / "README.md").read_text()


def test_a_killed_run_goes_on_as_if_nothing_had_happened(make: MakeConfig) -> None:
    whole = train(recipes.build("joint", make("whole")))

    def kill(row: dict[str, Any]) -> None:
        if row["step"] == 4:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        train(recipes.build("joint", make("killed")), kill)
    resumed = train(recipes.build("joint", make("killed")))
    expected, found = (load_file(f / "model.safetensors") for f in (whole, resumed))
    for name in expected:
        assert torch.equal(found[name], expected[name]), name
    rows = [
        [{k: v for k, v in row.items() if k != "seconds"} for row in read_metrics(f.parent)]
        for f in (whole, resumed)
    ]
    assert rows[0] == rows[1]


@each_precision
def test_evaluates_in_the_precision_that_it_trains_in(
    make: MakeConfig, precision: str, dtype: torch.dtype
) -> None:
    recipe = build(make(precision=precision))
    check_evaluates_in(dtype, recipe, recipe.module.trainable.model, lambda out: out.logits)


def test_the_card_shows_the_last_evaluation_and_makes_none(make: MakeConfig) -> None:
    names = ("eval_ar_loss", "eval_diffusion_loss", "expected_acceptance_length")
    check_card_shows_the_last_evaluation(build(make(steps=2, eval_every=1)), names)


def test_the_card_names_a_hub_model_whole(make: MakeConfig) -> None:
    check_card_names_a_hub_model_whole(build(make(steps=1)))


def test_bf16_trains_too(make: MakeConfig) -> None:
    recipe = build(make(precision="bf16", steps=2, eval_every=2))
    train(recipe)
    assert {p.dtype for p in recipe.module.parameters()} == {torch.float32}
    assert all(row["loss"] > 0 for row in read_metrics(recipe.config.output))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mask_token_id": None}, "mask_token_id: the model has no mask token"),
        ({"mask_token_id": 3}, "mask_token_id: got 3, expected one that does not occur"),
        ({"num_eval_sequences": 28}, "got 28 examples, expected more than num_eval_sequences"),
        ({"targets": ("q_proj",)}, "targets: without a rank"),
        ({"max_length": 5}, "expected at most 5"),
        ({"block_size": 1}, "block_size"),
    ],
)
def test_bad_input_is_refused_early(make: MakeConfig, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(make(**fields))
