"""The self-diffusion recipe: what it draws, what it measures, and that it learns to draft."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hybrid import HybridDecoder
from hybrid.errors import ConfigError
from hybrid.models.draft_config import read_adapter
from hybrid.models.loading import load_model
from hybrid.training import native, recipes
from hybrid.training.checkpoint import read_metrics
from hybrid.training.data import Example
from hybrid.training.loop import train
from hybrid.training.self_diffusion import recipe as module
from hybrid.training.self_diffusion.config import SelfDiffusionConfig
from hybrid.training.self_diffusion.loss import slot_targets
from hybrid.training.self_diffusion.recipe import build, draft_vocabulary

Make = Callable[..., SelfDiffusionConfig]


def adapter_bytes(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in (folder / "adapter").iterdir() if p.suffix != ".md"}


def losses(folder: Path) -> list[tuple[int, float, float]]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in read_metrics(folder)]


class KilledError(Exception):
    pass


def kill_at(step: int) -> Callable[[dict[str, Any]], None]:
    def report(row: dict[str, Any]) -> None:
        if row["step"] == step:
            raise KilledError

    return report


@pytest.mark.parametrize("keep_contexts", [False, True], ids=["computed", "kept"])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    make_config: Make, keep_contexts: bool
) -> None:
    whole, cut = make_config("whole"), make_config("cut", keep_contexts=keep_contexts)
    train(build(whole))
    with pytest.raises(KilledError):
        train(build(cut), kill_at(7))
    assert not (cut.output / "adapter").exists()
    train(build(cut))
    assert losses(cut.output) == losses(whole.output)
    assert len(losses(whole.output)) == 10
    assert adapter_bytes(cut.output) == adapter_bytes(whole.output)


def test_a_batch_follows_from_seed_step_and_index_alone(make_config: Make) -> None:
    def drawn(seed: int, step: int, index: int) -> tuple[Any, ...]:
        batch = build(make_config(seed=seed, short_share=0.5)).batch(step, index)
        return batch.context.tokens.tolist(), batch.anchors.tolist(), batch.num_draft_tokens

    assert drawn(3, 5, 1) == drawn(3, 5, 1)
    assert len({str(drawn(*key)) for key in [(3, 5, 1), (4, 5, 1), (3, 6, 1), (3, 5, 2)]}) == 4


def test_draws_short_drafts_as_often_as_told_and_anchors_of_the_response(make_config: Make) -> None:
    recipe = build(make_config(short_share=0.25, short_draft_tokens=2, keep_contexts=True))
    batches = [recipe.batch(step, 0) for step in range(200)]
    counts = [batch.num_draft_tokens for batch in batches]
    assert set(counts) == {2, 4}
    assert 0.1 < counts.count(2) / 200 < 0.4  # 5 standard deviations on either side
    for batch in batches:
        assert batch.anchors.tolist() == sorted(set(batch.anchors.tolist()))
        assert len(batch.anchors) == 8
        assert batch.anchors[0] >= 3
        assert batch.anchors[-1] < len(batch.context.tokens) - 1


def test_draft_vocabulary_is_what_occurs_most() -> None:
    examples = [Example((9,), (5, 5, 7)), Example((8,), (7, 5, 2))]
    assert draft_vocabulary(examples, None).tolist() == [2, 5, 7]
    assert draft_vocabulary(examples, 2).tolist() == [5, 7]
    assert draft_vocabulary(examples, 5).tolist() == [0, 1, 2, 5, 7]


FEW = [6, 7, 8, 9, 10, 11, 12, 13, 20]  # and what fills them up to sixteen
FILLED = [0, 1, 2, 3, 4, 5, *FEW[:8], 14, 20]


def few_tokens() -> str:
    return "".join(f'{{"p": [1, {n}], "r": {FEW + FEW}}}\n' for n in range(12))


@pytest.mark.parametrize(
    ("fields", "lines", "trained", "exported"),
    [
        ({}, few_tokens(), FILLED, 16),
        ({"draft_vocab_size": 10}, few_tokens(), [0, *FEW], 10),
        ({}, None, list(range(32)), None),
        ({"train_norms": False}, few_tokens(), FILLED, 16),
        (
            {"train_norms": False, "entry_layer": 0, "feature_layers": (), "sampler_size": 0},
            few_tokens(),
            FEW,
            None,
        ),
    ],
    ids=["few", "told", "all", "no-norms", "plain"],
)
def test_the_exported_vocabulary_is_the_one_that_was_trained(
    make_config: Make, fields: dict[str, Any], lines: str | None, trained: list[int], exported: Any
) -> None:
    if fields.get("entry_layer") == 0:
        fields = {**fields, "mask_token_id": 31}
    config = make_config(lines=lines, steps=2, eval_every=2, **fields)
    recipe = build(config)
    assert recipe.module.vocabulary.tolist() == trained
    folder = train(recipe)
    shape, tensors = read_adapter(folder)
    assert shape.draft_vocab_size == exported
    assert ("vocabulary" in tensors) == (exported is not None)
    if exported is not None:
        assert tensors["vocabulary"].tolist() == trained
    decoder = HybridDecoder.from_pretrained(config.model, dtype="bfloat16", adapter=folder)
    ours, plain = (
        decoder.generate([1, 30], strategy=strategy, max_new_tokens=20)
        for strategy in ("speculative", "ar")
    )
    assert ours.token_ids == plain.token_ids


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("float32", torch.float32)]
)
def test_precision_is_that_of_the_target_too(
    make_config: Make, precision: str, dtype: torch.dtype
) -> None:
    config = make_config(precision=precision, steps=2, eval_every=2)
    recipe = build(config)
    batch = recipe.batch(0, 0)
    states = [batch.context.key_value, *batch.context.hidden.values()]
    assert {t.dtype for t in [recipe.module.head, *states]} == {dtype}
    assert {p.dtype for p in recipe.module.parameters()} == {torch.float32}
    train(recipe)
    assert {t.dtype for t in read_adapter(config.output / "adapter")[1].values()} <= {
        torch.bfloat16,
        torch.int32,
    }


def test_preferences_of_decoding_reach_the_adapter_and_may_change(make_config: Make) -> None:
    config = make_config(steps=4, preferred_draft_tokens=2, confidence_floor=0.25)
    folder = train(build(config))
    shape, tensors = read_adapter(folder)
    assert (shape.preferred_draft_tokens, shape.confidence_floor) == (2, 0.25)
    before = losses(config.output)
    changed = config.replace(preferred_draft_tokens=None, confidence_floor=0.0)
    shape, again = read_adapter(train(build(changed)))
    assert (shape.preferred_draft_tokens, shape.confidence_floor) == (None, 0.0)
    assert losses(config.output) == before, "no step ran again"
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)
    assert "confidence_floor" not in (folder / "README.md").read_text(), "the card of what is there"


@pytest.mark.parametrize("size", [None, 12])
@pytest.mark.parametrize("distillation", [0.0, 0.3, 1.0])
def test_loss_is_the_sum_over_slots(
    make_config: Make, size: int | None, distillation: float
) -> None:
    config = make_config(
        distillation=distillation, draft_vocab_size=size, decay=2.0, anchors_per_sequence=99
    )
    recipe = build(config)  # every position is an anchor
    loss, backbone = recipe.module, recipe.module.model.backbone
    batch = recipe.batch(0, 0)
    logits = loss.model(batch.context, batch.anchors, loss.head, 4).double()
    tokens, ids = batch.context.tokens.tolist(), loss.vocabulary.tolist()
    assert batch.anchors[-1] + 4 >= len(tokens), "so that some slots are beyond the end"
    last = batch.context.hidden[backbone.num_layers - 1]
    total = weights = 0.0
    for n, anchor in enumerate(batch.anchors.tolist()):
        for j in range(4):
            if anchor + j + 1 >= len(tokens):
                continue
            weight = 2.718281828459045 ** (-j / 2.0)
            weights += weight
            log_probs = logits[n, j].log_softmax(-1)
            if tokens[anchor + j + 1] in ids:
                hard = -log_probs[ids.index(tokens[anchor + j + 1])].item()
                total += (1 - distillation) * weight * hard
            law = torch.nn.functional.linear(
                backbone.rms_norm(last[anchor + j], backbone.norm), loss.head
            )
            soft = -(law.double().softmax(-1) * log_probs).sum().item()
            total += distillation * weight * soft
    assert loss(batch)["loss"].item() == pytest.approx(total / weights, rel=1e-4)


def test_evaluation_walks_as_the_engine_does(make_config: Make) -> None:
    """On a draft that is made right and wrong at will, by a plain walk over the response."""
    recipe = build(make_config(num_eval_sequences=3))
    rights = []

    def fake(example: Example) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(len(rights))
        count = len(example.response) - 1
        exists = torch.arange(count)[:, None] + torch.arange(4) < count
        rights.append((torch.rand(count, 4, generator=draw) < 0.6) & exists)
        return rights[-1], exists

    recipe._right_slots = fake  # type: ignore[method-assign]
    measured = recipe.evaluate()
    lengths, exist = [], 0
    for right in rights:
        at = 0
        while at < len(right):
            length = 0
            while length < 4 and right[at, length]:
                length += 1
            lengths.append(length)
            at += length + 1
        exist += len(right)  # of first slots
    assert measured["expected_acceptance_length"] == pytest.approx(
        1 + sum(lengths) / len(lengths), abs=1e-4
    )
    shares = [sum(length > j for length in lengths) / len(lengths) for j in range(4)]
    assert measured["acceptance_by_position"] == pytest.approx(shares, abs=1e-4)
    first = sum(int(right[:, 0].sum()) for right in rights) / exist
    assert measured["accuracy_by_position"][0] == pytest.approx(first, abs=1e-4)


def test_right_slots_are_those_of_the_draft_model(make_config: Make) -> None:
    recipe = build(make_config(draft_vocab_size=10))
    example = recipe._held_out[0]
    right, exists = recipe._right_slots(example)
    model, loss = recipe.module.model, recipe.module
    context = module.target_context(model.backbone, model.config, example)
    assert right.shape == exists.shape == (len(example.response) - 1, 4)
    for row, anchor in enumerate(range(len(example.prompt), len(example.tokens) - 1)):
        logits = model(context, torch.tensor([anchor]), loss.head, 4)[0]
        chosen = loss.vocabulary[logits.argmax(-1)].tolist()
        follow = example.tokens[anchor + 1 : anchor + 5]
        assert exists[row].tolist() == [j < len(follow) for j in range(4)]
        expected = [j < len(follow) and chosen[j] == follow[j] for j in range(4)]
        assert right[row].tolist() == expected
    targets, _ = slot_targets(context, torch.tensor([len(example.prompt)]), 2)
    assert targets[0].tolist() == list(example.response[1:3])


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"num_eval_sequences": 48}, r"got 48 examples, expected more than .* \(48\)"),
        ({"entry_layer": 2}, "entry_layer: got 2, expected 0 to 1"),
        ({"feature_layers": (5,)}, "feature_layers: got"),
        ({"preferred_draft_tokens": 5}, "preferred_draft_tokens: got 5, expected 1 to 4"),
        ({"draft_vocab_size": 33}, "draft_vocab_size: got 33, expected at most 32"),
        ({"max_length": 10}, r"data.jsonl line 1: got 23 tokens, expected at most 10"),
        ({"lines": '{"p": [1], "r": [2, 3]}\n{"p": [1], "r": [2, 99]}'}, "line 2: got 99"),
    ],
)
def test_refuses_what_cannot_be_trained(
    make_config: Make, fields: dict[str, Any], match: str
) -> None:
    config = make_config(**fields)
    with pytest.raises(ConfigError, match=match):
        recipes.build("self-diffusion", config)
    assert not config.output.exists()


def test_missing_data_is_refused_before_the_model_is_fetched(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config()
    config.data.unlink()
    monkeypatch.setattr(native, "load_model", lambda *_, **__: pytest.fail("fetched the model"))
    with pytest.raises(ConfigError, match="data: .* cannot be read: No such file"):
        build(config)


def test_target_is_untouched_and_the_loss_falls(make_config: Make) -> None:
    config = make_config(steps=80, eval_every=80, anchors_per_sequence=16)
    recipe = build(config)
    train(recipe)
    used = recipe.module.model.backbone
    fresh = load_model(config.model, dtype="bfloat16", trainable=True).backbone
    pairs = [(used.embedding, fresh.embedding), (used.norm, fresh.norm)]
    pairs.append((used.head.weight, fresh.head.weight))
    for ours, theirs in zip(used.layers, fresh.layers, strict=True):
        pairs += [(getattr(ours, n), getattr(theirs, n)) for n in ("input_norm", "post_norm")]
        for name in ("qkv", "o", "gate_up", "down"):
            pairs.append((getattr(ours, name).weight, getattr(theirs, name).weight))
    assert all(torch.equal(a, b) for a, b in pairs)
    curve = [loss for _, loss, _ in losses(config.output)]
    assert sum(curve[-10:]) < 0.4 * sum(curve[:10])


@pytest.mark.parametrize("size", [None, 24], ids=["whole-vocabulary", "draft-vocabulary"])
def test_a_fitted_adapter_drafts_long_and_loses_nothing(
    make_config: Make, size: int | None
) -> None:
    config = make_config(
        steps=80, num_draft_tokens=6, anchors_per_sequence=16, draft_vocab_size=size
    )
    folder = train(build(config))
    row = read_metrics(config.output)[-1]
    assert row["expected_acceptance_length"] > (4 if size is None else 2)
    assert len(row["accuracy_by_position"]) == len(row["acceptance_by_position"]) == 6
    for dtype in ("float32", "bfloat16"):
        decoder = HybridDecoder.from_pretrained(config.model, dtype=dtype, adapter=folder)
        prompts = [[2, 1], [7], [31, 30, 4], list(range(20))]
        for num_new in (1, 5, 6, 7, 40):
            plain = decoder.generate(prompts, strategy="ar", max_new_tokens=num_new)
            ours = decoder.generate(prompts, strategy="speculative", max_new_tokens=num_new)
            assert [r.token_ids for r in ours] == [r.token_ids for r in plain]
        assert sum(r.stats.acceptance_length for r in ours) / len(ours) > (
            2 if size is None else 1.5
        )
        assert size or any(r.stats.acceptance_histogram[-1] > 0 for r in ours), "all six accepted"


def test_the_adapter_on_disk_is_what_was_trained(make_config: Make) -> None:
    config = make_config(draft_vocab_size=16)
    recipe = build(config)
    folder = train(recipe)
    state = torch.load(config.output / "checkpoint.pt", weights_only=True)["model"]
    saved = load_file(folder / "draft_model.safetensors")
    assert torch.equal(saved["slots"], state["model.slots"].bfloat16())
    assert saved["slots"].abs().max() > 0
    assert saved["vocabulary"].tolist() == recipe.module.vocabulary.tolist()


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 16, 24, 28, 30, 32, 36, 80])
def test_the_layers_follow_the_model(num_layers: int) -> None:
    config = SelfDiffusionConfig(data=Path("data.jsonl"), output=Path("run"))
    entry, features = config.layers(num_layers)
    assert entry >= 1
    assert features == tuple(sorted(set(features)))
    assert num_layers == 1 or entry < num_layers
    assert all(0 <= layer < num_layers for layer in features)
    chosen = config.replace(entry_layer=0)
    assert chosen.layers(num_layers) == (0, ())


def test_a_run_may_begin_with_an_adapter(make_config: Make) -> None:
    first = make_config("first")
    train(build(first))
    adapter = first.output / "adapter"
    config, tensors = read_adapter(adapter)
    second = build(make_config("second", init_from=adapter, seed=9, confidence_floor=0.2))
    begun = second.module.model.adapter_tensors()
    for name, value in begun.items():
        torch.testing.assert_close(value, tensors[name].float(), rtol=0, atol=0)
    if "vocabulary" in tensors:
        assert second.module.vocabulary.tolist() == tensors["vocabulary"].tolist()
    # What it prefers is the new run's.
    assert second.module.model.config.confidence_floor == 0.2
    assert second.module.model.config.entry_layer == config.entry_layer


def test_an_adapter_of_another_shape_is_no_beginning(make_config: Make) -> None:
    first = make_config("first")
    train(build(first))
    adapter = first.output / "adapter"
    rank = first.rank
    with pytest.raises(ConfigError, match=rf"init_from: .*rank {rank} instead of {rank + 1}"):
        build(make_config("second", init_from=adapter, rank=rank + 1))
