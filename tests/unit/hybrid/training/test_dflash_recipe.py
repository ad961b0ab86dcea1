"""The dflash recipe from data to a drafter that this engine and transformers decode with alike."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_checks import (
    check_card_names_a_hub_model_whole,
    check_evaluates_in,
    each_precision,
)
from safetensors.torch import load_file, save_file

from hybrid import HybridDecoder
from hybrid.errors import ConfigError
from hybrid.models.dflash_files import load_dflash
from hybrid.models.tiny import tiny_checkpoint
from hybrid.training.config import TrainConfig
from hybrid.training.dflash.config import DFlashConfig
from hybrid.training.dflash.module import Blocks
from hybrid.training.dflash.recipe import DFlashRecipe, build, right_drafts
from hybrid.training.loop import train
from hybrid.training.recipes import config_class

VOCAB, MASK, NEW = 40, 39, 24
Make = Callable[..., DFlashConfig]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without attention, in which each token alone decides the next; MASK is never said."""
    path = tiny_checkpoint(
        tmp_path_factory.mktemp("dflash"), "qwen3", vocab_size=VOCAB, num_layers=4, tokenizer=False
    )
    weights = load_file(path / "model.safetensors")
    for name in weights:
        if "o_proj" in name:
            weights[name].zero_()
    weights["lm_head.weight"][MASK] = 0.0
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def lines(target: Path) -> str:
    """What the target answers, as JSON lines."""
    prompts = [[1, other, token] for other in (2, 3) for token in range(VOCAB - 1)]
    random.Random(0).shuffle(prompts)
    decoder = HybridDecoder.from_pretrained(target)
    answers = decoder.generate(prompts, strategy="ar", max_new_tokens=NEW)
    pairs = zip(prompts, answers, strict=True)
    return "".join(json.dumps({"p": p, "r": a.token_ids}) + "\n" for p, a in pairs)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, target: Path, lines: str) -> Make:
    """A function that returns a short configuration."""

    def config(**fields: Any) -> DFlashConfig:
        folder = tmp_path_factory.mktemp("run")
        (folder / "data.jsonl").write_text(fields.pop("lines", lines))
        own = {
            "data": folder / "data.jsonl",
            "output": folder / "run",
            "model": str(target),
            "num_draft_layers": 2,
            "block_size": 5,
            "mask_token_id": MASK,
            "steps": 120,
            "warmup_steps": 5,
            "eval_every": 60,
            "learning_rate": 4e-3,
            "num_eval_sequences": 6,
            "precision": "float32",
            "export_dtype": "float32",
        }
        return DFlashConfig(**{**own, **fields})

    return config


@pytest.fixture(scope="module")
def trained(make: Make) -> tuple[DFlashRecipe, Path, list[dict[str, Any]]]:
    """A recipe that has run, its drafter's folder and the rows of its steps."""
    recipe, rows = build(make()), []
    return recipe, train(recipe, rows.append), rows


def test_training_teaches_it_to_draft(trained: Any) -> None:
    _, _, rows = trained
    losses = [row["loss"] for row in rows]
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    last = rows[-1]
    assert last["expected_acceptance_length"] > rows[59]["expected_acceptance_length"] > 1.2
    assert last["expected_acceptance_length"] > 2.5
    accuracy, acceptance = last["accuracy_by_position"], last["acceptance_by_position"]
    assert len(accuracy) == len(acceptance) == 4
    assert accuracy[0] == acceptance[0]
    assert all(a >= b for a, b in zip(accuracy, acceptance, strict=True))
    assert acceptance == sorted(acceptance, reverse=True)
    # All drafts have the same number of tokens to predict but those at the very end.
    assert last["expected_acceptance_length"] == pytest.approx(1 + sum(acceptance), abs=0.2)


def test_the_engine_accepts_what_training_measured(trained: Any, target: Path) -> None:
    recipe, folder, _ = trained
    decoder = HybridDecoder.from_pretrained(target, drafter=folder)
    for example in recipe.held_out:
        events = list(decoder.stream(list(example.prompt), max_new_tokens=NEW))
        rounds = [event.record.rows[0] for event in events[1:]]
        assert events[-1].result.token_ids == example.response
        anchor, lengths = len(example.prompt), []
        for step in rounds:
            lengths.append((anchor, step.num_accepted, step.num_drafted))
            anchor += len(step.tokens)
        blocks = recipe._blocks(example, torch.tensor([a for a, _, _ in lengths]))
        right, _ = right_drafts(recipe.module, blocks)
        leading = right.long().cumprod(dim=1).sum(dim=1).tolist()
        # The last draft is cut to what may still be committed.
        assert [min(n, k) for n, (_, _, k) in zip(leading, lengths, strict=True)] == [
            accepted for _, accepted, _ in lengths
        ]
    assert sum(accepted for _, accepted, _ in lengths) > 5


def test_transformers_drafts_with_the_exported_files(
    trained: Any, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock `generate(speculation_type="dflash")`: the target's tokens, and as many accepted."""
    library = pytest.importorskip("transformers.models.muse_glimmer_assistant")
    from transformers import AutoModelForCausalLM
    from transformers.generation import candidate_generator

    recipe, folder, _ = trained
    drafter = library.MuseGlimmerAssistantModel(_muse_config(library, folder)).eval()
    names = {
        "fc.weight": "encoder.fc.weight",
        "hidden_norm.weight": "encoder.output_norm_enc.weight",
    }
    tensors = load_file(folder / "model.safetensors")
    drafter.load_state_dict({names.get(name, name): value for name, value in tensors.items()})
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    ours = HybridDecoder.from_pretrained(target, drafter=folder)
    theirs: list[tuple[int, int]] = []  # drafted and accepted, per round
    monkeypatch.setattr(
        candidate_generator.DFlashTokenCandidateGenerator,
        "update_candidate_strategy",
        lambda self, ids, scores, n: theirs.append((scores.shape[1] - 1, int(n))),
    )
    for example in recipe.held_out[:3]:
        theirs.clear()
        prompt = torch.tensor([example.prompt])
        ids = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW,
            do_sample=False,
            assistant_model=drafter,
            speculation_type="dflash",
        )
        assert tuple(ids[0, prompt.shape[1] :].tolist()) == example.response
        events = list(ours.stream(list(example.prompt), max_new_tokens=NEW))
        rounds = [event.record.rows[0] for event in events[1:]]
        found = [n for drafted, n in theirs if drafted]
        # Of the last rounds only what still fits the limit counts, on either side.
        assert len(found) >= len(rounds) - 1
        assert found[: len(rounds) - 1] == [step.num_accepted for step in rounds[:-1]]
        by_position = [sum(n > i for n in found[: len(rounds) - 1]) for i in range(4)]
        assert by_position[1] > 0, "nothing accepted proves little"


_SHARED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "layer_types",
    "block_size",
)


def _muse_config(library: Any, folder: Path) -> Any:
    config = json.loads((folder / "config.json").read_text())
    own = config["dflash_config"]
    return library.MuseGlimmerAssistantConfig(
        **{name: config[name] for name in _SHARED},
        mask_token_id=own["mask_token_id"],
        target_layer_ids=own["target_layer_ids"],
        rope_parameters={"rope_type": "default", "rope_theta": config["rope_theta"]},
    )


def test_the_export_is_whole(trained: Any) -> None:
    recipe, folder, rows = trained
    assert folder.name == "dflash"
    assert folder.parent == recipe.config.output
    model = load_dflash(folder)
    for name, value in recipe.module.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    card = (folder / "README.md").read_text()
    assert str(rows[-1]["expected_acceptance_length"]) in card
    assert recipe.data_sha256 in card
    assert "/" not in card.split("```json")[1].replace("</", ""), "a path of this machine"


def test_a_batch_depends_on_seed_step_and_index_alone(make: Make) -> None:
    recipe, twin = build(make()), build(make())

    def same(a: Blocks, b: Blocks) -> bool:
        return torch.equal(a.tokens, b.tokens) and torch.equal(a.anchors, b.anchors)

    first = recipe.batch(3, 1)
    recipe.batch(0, 0)
    assert same(first, recipe.batch(3, 1))
    assert same(first, twin.batch(3, 1))
    assert torch.equal(first.features, twin.batch(3, 1).features)
    others = [build(make(seed=1)).batch(3, 1), recipe.batch(3, 0), recipe.batch(4, 1)]
    assert not any(same(first, other) for other in others)
    for name, value in recipe.module.state_dict().items():
        assert torch.equal(value, twin.module.state_dict()[name])
    texts = [torch.tensor(example.tokens) for example in recipe.train]
    held_out = [torch.tensor(example.tokens) for example in recipe.held_out]
    assert len(texts) == 2 * (VOCAB - 1) - 6
    for step in range(20):
        blocks = recipe.batch(step, 0)
        assert any(torch.equal(blocks.tokens, text) for text in texts)
        assert blocks.anchors.tolist() == sorted(set(blocks.anchors.tolist()))
        assert 3 <= blocks.anchors.min() <= blocks.anchors.max() <= len(blocks.tokens) - 2
    assert held_out


@pytest.mark.parametrize("init", ["target", "random"])
def test_either_start_learns(make: Make, init: str) -> None:
    rows: list[dict[str, Any]] = []
    recipe = build(make(init=init, steps=20, eval_every=20))
    weight = recipe.module.model.state_dict()["layers.1.mlp.down_proj.weight"].clone()
    assert torch.equal(weight, recipe.module.backbone.layers[3].down.weight) == (init == "target")
    train(recipe, rows.append)
    assert sum(row["loss"] for row in rows[-5:]) < 0.8 * sum(row["loss"] for row in rows[:5])


def test_bf16_and_distillation_train(make: Make) -> None:
    rows: list[dict[str, Any]] = []
    fields = {"precision": "bf16", "distillation": 0.5, "steps": 20, "eval_every": 20}
    folder = train(build(make(**fields, export_dtype="bfloat16")), rows.append)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert load_file(folder / "model.safetensors")["fc.weight"].dtype == torch.bfloat16


@each_precision
def test_evaluates_in_the_precision_that_it_trains_in(
    make: Make, precision: str, dtype: torch.dtype
) -> None:
    recipe = build(make(precision=precision))
    check_evaluates_in(dtype, recipe, recipe.module.model.fc, lambda out: out)


def test_the_card_names_a_hub_model_whole(make: Make) -> None:
    check_card_names_a_hub_model_whole(build(make(steps=1)))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"lines": '{"p": [1], "r": [2, 3]}\n'}, "more than num_eval_sequences"),
        ({"lines": '{"p": [1], "r": []}\n'}, "line 1"),
        ({"target_layer_ids": (0, 3)}, "not the last one"),
        ({"target_layer_ids": (9,)}, "target_layer_ids"),
        ({"mask_token_id": 1}, "does not occur in the data"),
        ({"mask_token_id": None}, "mask_token_id"),
        ({"num_heads": 3}, "multiple of num_kv_heads"),
    ],
)
def test_bad_input_is_refused_early(make: Make, fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        build(make(**fields))


def test_shapes_of_its_own(make: Make) -> None:
    fields = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "intermediate_size": 24}
    recipe = build(make(**fields, target_layer_ids=(2, 0), num_draft_layers=1))
    spec = recipe.module.model.spec
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (2, 1, 8)
    assert (spec.intermediate_size, spec.num_layers, spec.target_layer_ids) == (24, 1, (2, 0))
    assert recipe.module(recipe.batch(0, 0))["loss"].isfinite()


def test_the_recipe_is_known_by_name() -> None:
    assert config_class("dflash") is DFlashConfig
    assert issubclass(DFlashConfig, TrainConfig)
    with pytest.raises(ConfigError, match="block_size"):
        DFlashConfig(data="d", output="o", block_size=1)
    with pytest.raises(ConfigError, match="Did you mean 'num_draft_layers'"):
        DFlashConfig(data="d", output="o", num_draft_layer=1)
