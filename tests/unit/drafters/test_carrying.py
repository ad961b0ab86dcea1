"""Carried slots are those of an ordinary draft pass behind the text that their group assumes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from carrying import diffusion_backbone, ordinary_slots, prepared
from fakes import random_adapter, random_prompts, tiny_backbone
from torch import Tensor

from hybrid.attention.pattern import causal
from hybrid.carried import KeptSlots
from hybrid.drafters.combined import CombinedDrafter
from hybrid.drafters.self_diffusion import SelfDiffusionDrafter
from hybrid.models.transformer import NativeBackbone
from hybrid.params import SamplingParams
from hybrid.protocols import CarryingDrafter, DraftState, can_carry
from hybrid.types import Mode, Plan, SequenceState

K = 5
LATE = {"entry_layer": 1, "feature_layers": (0, 2)}
LATER = {"entry_layer": 2, "feature_layers": (0, 1, 2)}
PLAIN = {"entry_layer": 0, "mask_token_id": 9}
UNIFORM = {"entry_layer": 0, "corruption": "uniform", "train_norms": False}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "late": ("llama", LATE),
    "later": ("llama", LATER),
    "late-window": ("mistral-window", LATE),
    "late-norms": ("qwen3", LATE),
    "plain": ("llama", PLAIN),
    "plain-window": ("mistral-window", PLAIN),
    "uniform": ("llama", UNIFORM),
    "uniform-window": ("mistral-window", UNIFORM),
    "nemotron": ("nemotron", {}),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def backbone_of(name: str, dtype: torch.dtype) -> NativeBackbone:
    if name != "nemotron":
        return tiny_backbone(name, dtype)
    return diffusion_backbone(name, dtype)


def drafter_of(kind: str, dtype: torch.dtype = torch.float64) -> SelfDiffusionDrafter:
    name, fields = KINDS[kind]
    backbone = backbone_of(name, dtype)
    if not fields:
        return SelfDiffusionDrafter(backbone, block_size=K + 1)
    return SelfDiffusionDrafter(backbone, random_adapter(backbone, K, seed=3, **fields))


def carried_slots(
    drafter: SelfDiffusionDrafter,
    prompts: Sequence[Sequence[int]],
    drafts: Sequence[Sequence[int]],
    points: Sequence[Sequence[int]],
    params: SamplingParams,
    count: int = K,
) -> tuple[list[dict[int, Tensor]], list[SequenceState]]:
    """Return per row {point: [K, C]} of a target pass that feeds `drafts`, and the rows."""
    rows, kv, hidden = prepared(drafter, prompts, params)
    inputs = torch.tensor([[r.anchor, *d] for r, d in zip(rows, drafts, strict=True)])
    carried = drafter.carry(DraftState(rows, kv, hidden), inputs, points, count)
    assert carried is not None
    starts = [row.cached_len for row in rows]
    out = drafter._backbone.forward(
        inputs,
        torch.tensor(starts)[:, None] + torch.arange(inputs.shape[1]),
        causal(starts, inputs.shape[1]),
        kv,
        [row.row for row in rows],
        carried=carried,
    )
    assert out.carried is not None
    own = out.carried.unflatten(1, (-1, carried.group_size))[:, :, carried.first_drafting :]
    found = [{j: own[b, g] for g, j in enumerate(some)} for b, some in enumerate(points)]
    return found, rows


PROMPTS = random_prompts(9, 1, 17, 4, vocab_size=48)
DRAFTS = random_prompts(3, 3, 3, 3, vocab_size=48, seed=8)
RAGGED = [(0, 1, 2, 3), (2,), (), (0, 3)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@each_kind
def test_a_group_is_the_draft_pass_behind_its_point(kind: str, dtype: torch.dtype) -> None:
    params = SamplingParams(max_new_tokens=30, seed=6)
    drafter = drafter_of(kind, dtype)
    # Random tokens make states of up to 80 here, and causal passes round by other products.
    near = 5e-4 if "uniform" in kind else 2e-5
    close = {"rtol": 0.0, "atol": 1e-9 if dtype == torch.float64 else near}
    found, rows = carried_slots(drafter, PROMPTS, DRAFTS, RAGGED, params)
    seen = 0
    for row, draft, own in zip(rows, DRAFTS, found, strict=True):
        for point, slots in own.items():
            text = [*row.tokens, *draft[:point]]
            expected = ordinary_slots(drafter, text, params, K, zero=point > 0)
            assert slots.shape == expected.shape == (K, drafter._backbone.hidden_size)
            torch.testing.assert_close(slots, expected, **close)
            seen += 1
    assert seen == sum(map(len, RAGGED))


@pytest.mark.parametrize("kind", ["late", "later"])
def test_zeroed_features_matter(kind: str) -> None:
    """Else the test above would not see whether a group was given what it cannot know."""
    params, drafter = SamplingParams(max_new_tokens=30), drafter_of(kind)
    with_them = ordinary_slots(drafter, PROMPTS[0], params, K, zero=False)
    without = ordinary_slots(drafter, PROMPTS[0], params, K, zero=True)
    assert (with_them - without).abs().max() > 0.1


@each_kind
@pytest.mark.parametrize("count", [1, 3, K + 1])
def test_fewer_slots_are_a_shorter_pass_and_never_more_than_trained(kind: str, count: int) -> None:
    params, drafter = SamplingParams(max_new_tokens=30), drafter_of(kind)
    trained = drafter._adapter.config.num_draft_tokens  # Nemotron's own blocks are longer
    (own,), (row,) = carried_slots(drafter, PROMPTS[:1], DRAFTS[:1], [(1,)], params, count)
    text = [*row.tokens, DRAFTS[0][0]]
    expected = ordinary_slots(drafter, text, params, min(count, trained), zero=True)
    torch.testing.assert_close(own[1], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@each_kind
def test_drafting_from_point_0_is_drafting_afresh(kind: str, temperature: float) -> None:
    """The same tokens from the same stream, the same law and certainty, without a pass."""
    params = SamplingParams(temperature=temperature, max_new_tokens=30, seed=6)
    drafter = drafter_of(kind)
    found, rows = carried_slots(drafter, PROMPTS[:2], DRAFTS[:2], [(0,), (0,)], params)
    slots = {r.row: KeptSlots(len(r.tokens), 1, own[0]) for r, own in zip(rows, found, strict=True)}
    plan = Plan(Mode.FUSED, K)
    rows, kv, hidden = prepared(drafter, PROMPTS[:2], params)
    reused = drafter.draft(DraftState(rows, kv, hidden, slots, wants_features=True), plan)
    assert (reused.num_forwards, reused.num_drafting, reused.first_slot) == (0, 0, (1, 1))
    rows, kv, hidden = prepared(drafter, PROMPTS[:2], params)
    fresh = drafter.draft(DraftState(rows, kv, hidden, {}, wants_features=True), plan)
    assert (fresh.num_forwards, fresh.num_drafting, fresh.first_slot) == (1, 2, (1, 1))
    assert torch.equal(reused.tokens, fresh.tokens)
    assert reused.num_tokens == fresh.num_tokens == (K, K)
    for name in ("draft_probs", "entropy", "confidence", "margin"):
        one, other = getattr(reused, name), getattr(fresh, name)
        assert (one is None) == (other is None) == (name == "draft_probs" and not temperature)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_rows_with_and_without_slots_share_a_draft(temperature: float) -> None:
    """One pass for the rows that have none; each row drafts and draws what it would alone."""
    params = SamplingParams(temperature=temperature, max_new_tokens=30, seed=6)
    drafter, plan = drafter_of("late"), Plan(Mode.FUSED, K)
    made = torch.randn(K, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def slots_of(row: SequenceState) -> dict[int, KeptSlots]:
        own = {1: KeptSlots(len(row.tokens), 3, made[:2]), 3: KeptSlots(len(row.tokens), 2, made)}
        return {row.row: own[row.row]} if row.row in own else {}

    rows, kv, hidden = prepared(drafter, PROMPTS, params)
    slots = {k: v for row in rows for k, v in slots_of(row).items()}
    together = drafter.draft(DraftState(rows, kv, hidden, slots), plan)
    assert together.num_tokens == (K, 2, K, K)
    assert together.first_slot == (1, 3, 1, 2)
    assert (together.num_forwards, together.num_drafting) == (1, 2)
    after = [row.stream.offset for row in rows]
    for b in range(len(PROMPTS)):
        rows, kv, hidden = prepared(drafter, PROMPTS, params)
        some = {n: values[b : b + 1] for n, values in hidden.items()}
        alone = drafter.draft(DraftState(rows[b : b + 1], kv, some, slots_of(rows[b])), plan)
        count = together.num_tokens[b]
        assert alone.num_tokens == (count,)
        assert torch.equal(alone.tokens[0, :count], together.tokens[b, :count])
        assert rows[b].stream.offset == after[b]
        if temperature:
            assert alone.draft_probs is not None
            assert together.draft_probs is not None
            torch.testing.assert_close(
                alone.draft_probs[0, :count], together.draft_probs[b, :count]
            )


def test_a_floor_ends_a_draft_of_carried_slots_too() -> None:
    """By hand: the product of the best probabilities falls below it."""
    backbone = tiny_backbone()
    adapter = random_adapter(backbone, K, seed=3)
    slots = torch.randn(K, 64, generator=torch.Generator().manual_seed(2))
    best = adapter.head.logits(slots, None).softmax(-1).amax(-1).cumprod(0)
    for length in range(K):
        floor = float(best[length]) * 1.01
        config = dataclasses.replace(adapter.config, confidence_floor=floor)
        floored = random_adapter(backbone, K, seed=3)
        floored.config = config
        drafter = SelfDiffusionDrafter(backbone, floored)
        (row,), kv, hidden = prepared(drafter, PROMPTS[:1], SamplingParams(max_new_tokens=30))
        state = DraftState([row], kv, hidden, {0: KeptSlots(len(row.tokens), 2, slots)})
        assert drafter.draft(state, Plan(Mode.FUSED, K)).num_tokens == (length,)


def test_who_needs_several_passes_cannot_carry() -> None:
    backbone = tiny_backbone()
    twice = random_adapter(backbone, K, num_passes=2)
    nemotron = backbone_of("nemotron", torch.float64)
    refusing = [
        SelfDiffusionDrafter(backbone, twice),
        SelfDiffusionDrafter(nemotron, threshold=0.5),
        CombinedDrafter(backbone, twice),
    ]
    once = random_adapter(backbone, K)
    carrying = [SelfDiffusionDrafter(backbone, once), CombinedDrafter(backbone, once)]
    for drafter in (*refusing, *carrying):
        assert isinstance(drafter, CarryingDrafter)
        assert can_carry(drafter) == (drafter in carrying)
