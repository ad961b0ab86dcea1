"""Training of the other draft passes: what is shown, what is measured, and that they learn."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import make_engine

from hybrid import HybridDecoder
from hybrid.decode.loop import prefill
from hybrid.drafters.self_diffusion import SelfDiffusionDrafter
from hybrid.errors import ConfigError
from hybrid.models.adapter import DiffusionAdapter, load_adapter
from hybrid.models.draft_input import MASKED
from hybrid.models.tiny import tiny_checkpoint
from hybrid.params import SamplingParams
from hybrid.protocols import DraftState
from hybrid.training.checkpoint import read_metrics
from hybrid.training.loop import train
from hybrid.training.self_diffusion.config import SelfDiffusionConfig
from hybrid.training.self_diffusion.context import target_context
from hybrid.training.self_diffusion.loss import slot_targets
from hybrid.training.self_diffusion.recipe import build
from hybrid.types import Mode, Plan

Make = Callable[..., SelfDiffusionConfig]
KINDS: dict[str, dict[str, Any]] = {
    "tokens": {"entry_layer": 0, "mask_token_id": 5},
    "plain": {"entry_layer": 0, "mask_token_id": 5, "train_norms": False},
    "passes": {"entry_layer": 0, "mask_token_id": 5, "num_passes": 2},
    "late-passes": {"num_passes": 3},
    "uniform": {"entry_layer": 0, "corruption": "uniform", "train_norms": False},
}


def answers(response: Iterable[int]) -> str:
    """Return one answer to twelve prompts, as JSON lines."""
    return "".join(f'{{"p": [1, {n}], "r": {[*response]}}}\n' for n in range(20, 32))


def kind_config(make_config: Make, kind: str, **fields: Any) -> SelfDiffusionConfig:
    own = {"sampler_size": 0, "num_draft_tokens": 4, **KINDS[kind], **fields}
    if own.get("entry_layer") == 0:
        own["feature_layers"] = ()
    if "mask_token_id" in own:  # which must not occur in the data
        own.setdefault("lines", answers(range(6, 28)))
    return make_config(**own)


def test_shown_tokens_are_true_and_as_many_as_known_before_a_pass(make_config: Make) -> None:
    recipe = build(kind_config(make_config, "late-passes", num_draft_tokens=6))
    counts: dict[int, int] = {}
    where = torch.zeros(6)
    for step in range(60):
        batch = recipe.batch(step, 0)
        assert batch.shown is not None
        assert batch.shown.shape == (len(batch.anchors), 6)
        targets, exists = slot_targets(batch.context, batch.anchors, 6)
        is_shown = batch.shown != MASKED
        assert torch.equal(batch.shown[is_shown], targets[is_shown])
        assert not (is_shown & ~exists).any()
        whole = exists.all(dim=1)
        for number in is_shown[whole].sum(dim=1).tolist():
            counts[number] = counts.get(number, 0) + 1
        where += is_shown[whole].sum(dim=0)
    assert set(counts) == {0, 2, 4}, "before pass 1, 2 and 3 of 6 slots"
    assert min(counts.values()) > 60
    assert where.min() > 0.8 * where.max(), "any slots"
    again = recipe.batch(7, 0).shown
    assert torch.equal(again, recipe.batch(7, 0).shown)  # type: ignore[arg-type]


def test_random_tokens_are_drawn_anew_for_every_anchor(make_config: Make) -> None:
    recipe = build(kind_config(make_config, "uniform"))
    shown = [recipe.batch(step, 0).shown for step in range(100)]
    assert all(s is not None and s.shape[1] == 3 for s in shown)
    drawn = torch.cat([s.flatten() for s in shown if s is not None])
    counts = torch.bincount(drawn, minlength=32)
    assert len(counts) == 32
    assert counts.min() > 0.6 * len(drawn) / 32
    assert counts.max() < 1.5 * len(drawn) / 32
    assert build(kind_config(make_config, "plain")).batch(0, 0).shown is None


def test_a_shown_token_costs_nothing(make_config: Make) -> None:
    recipe = build(kind_config(make_config, "late-passes", decay=2.0))
    loss, batch = recipe.module, recipe.batch(3, 0)
    assert batch.shown is not None
    logits = loss.model(batch.context, batch.anchors, loss.head, 4, batch.shown)
    targets, exists = slot_targets(batch.context, batch.anchors, 4)
    total = weights = 0.0
    for n, j in (exists & (batch.shown == MASKED)).nonzero().tolist():
        weight = 2.718281828459045 ** (-j / 2.0)
        column = int(torch.searchsorted(loss.vocabulary, targets[n, j]))
        total -= weight * logits[n, j].double().log_softmax(-1)[column].item()
        weights += weight
    assert (batch.shown != MASKED).any()
    assert loss(batch)["loss"].item() == pytest.approx(total / weights, rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_drafts_what_the_engine_drafts(make_config: Make, kind: str) -> None:
    """In float32, so that no near-tie tells them apart; nine tokens occur in the answers."""
    lines = answers([*range(6, 15), *range(6, 15)])
    recipe = build(kind_config(make_config, kind, precision="float32", lines=lines))
    model, backbone = recipe.module.model, recipe.module.model.backbone
    for value in model.parameters():
        torch.nn.init.normal_(value, std=0.3, generator=torch.Generator().manual_seed(1))
    tensors = model.adapter_tensors()
    if not model.config.is_plain:
        tensors["vocabulary"] = recipe.module.vocabulary
    example = recipe._held_out[0]
    context = target_context(backbone, model.config, example)
    drafter = SelfDiffusionDrafter(backbone, DiffusionAdapter(backbone, model.config, tensors))
    seen: set[int] = set()
    for anchor in (len(example.prompt), len(example.prompt) + 7):
        params = SamplingParams(max_new_tokens=20)
        engine, (row,) = make_engine(backbone, drafter, [example.tokens[:anchor]], params)
        _, hidden = prefill(engine, row)
        row.tokens[-1] = example.tokens[anchor]
        proposal = drafter.draft(DraftState([row], engine.cache, hidden), Plan(Mode.SPECULATIVE, 4))
        ours = recipe._draft(context, torch.tensor([anchor, anchor]))
        assert ours.tolist() == [proposal.tokens[0].tolist()] * 2
        seen |= set(ours.flatten().tolist())
    assert (max(seen) < 16) == (not model.config.is_plain), "a plain adapter drafts from all tokens"


@pytest.mark.parametrize("kind", ["plain", "passes", "uniform"])
def test_it_learns_and_loses_nothing(make_config: Make, kind: str) -> None:
    config = kind_config(make_config, kind, steps=60, anchors_per_sequence=16, eval_every=60)
    folder = train(build(config))
    rows = read_metrics(config.output)
    assert sum(r["loss"] for r in rows[-8:]) < 0.5 * sum(r["loss"] for r in rows[:8])
    assert rows[-1]["expected_acceptance_length"] > 2
    names = {path.name for path in folder.iterdir()}
    assert ("draft_model.safetensors" in names) == (kind == "passes")
    card = (folder / "README.md").read_text()
    assert ("stock PEFT\ndrafts with it" in card) == (kind != "passes")
    assert ("2 passes" in card) == (kind == "passes")
    assert ("random tokens" in card) == (kind == "uniform")
    decoder = HybridDecoder.from_pretrained(config.model, dtype="float32", adapter=folder)
    prompts = [[2, 1], [7], [31, 30, 4]]
    ours = decoder.generate(prompts, max_new_tokens=40)
    plain = decoder.generate(prompts, strategy="ar", max_new_tokens=40)
    assert [r.token_ids for r in ours] == [r.token_ids for r in plain]
    assert all(r.stats.num_draft_forwards > 0 for r in ours)


def test_the_mask_token_is_a_free_one(tmp_path: Path) -> None:
    model = tiny_checkpoint(tmp_path / "model", num_layers=2)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"p": [1, {n}], "r": [50, 60, 70, 2]}}\n' for n in range(40, 45)))
    fields: dict[str, Any] = {
        "data": data, "output": tmp_path / "run", "model": str(model), "num_eval_sequences": 1,
        "entry_layer": 0, "feature_layers": (), "sampler_size": 0, "num_draft_tokens": 2,
        "rank": 2,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="no mask token and no special token"):
        build(SelfDiffusionConfig(**fields))
    data.write_text("".join(f'{{"p": [{n}], "r": [50, 60, 70, 2]}}\n' for n in range(40, 45)))
    # Token 1 is special, and free now.
    assert build(SelfDiffusionConfig(**fields)).module.model.config.mask_token_id == 1
    chosen = build(SelfDiffusionConfig(**fields, mask_token_id=99))
    assert chosen.module.model.config.mask_token_id == 99
    with pytest.raises(ConfigError, match="mask_token_id: got 50, expected one that does not occ"):
        build(SelfDiffusionConfig(**fields, mask_token_id=50))
    folder = train(build(SelfDiffusionConfig(**fields, steps=2, eval_every=2)))
    decoder = HybridDecoder.from_pretrained(model, adapter=folder)
    assert load_adapter(decoder.backbone, folder).config.mask_token_id == 1


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        (
            {"entry_layer": 0, "corruption": "uniform"},
            "feature_layers: got .* expected none with entry_layer 0",
        ),
        ({"corruption": "uniform"}, "corruption: got 'uniform', expected 'mask' unless"),
        ({"num_passes": 2, "sampler_size": 8}, "num_passes: got 2, expected 1"),
        ({"feature_layers": ()}, "feature_layers: got .* at least one layer"),
        ({"mask_token_id": 3}, "mask_token_id: got 3, expected none"),
    ],
)
def test_refuses_options_that_contradict(
    make_config: Make, fields: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        build(make_config(**{"entry_layer": 1, **fields}))


@pytest.mark.parametrize(
    "fields",
    [
        {"targets": []},
        {"targets": ["q"]},
        {"corruption": "x"},
        {"num_passes": 0},
        {"confidence_floor": 1.0},
        {"preferred_draft_tokens": 0},
    ],
)
def test_unknown_options_are_refused(make_config: Make, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        make_config(**fields)
