"""Routers are pure; the adaptive one takes the faster side."""

from __future__ import annotations

import random

import pytest
import torch

from hybrid.params import SamplingParams
from hybrid.protocols import Router
from hybrid.router.adaptive import AdaptiveRouter
from hybrid.router.fixed import FixedRouter
from hybrid.types import Mode, Plan, Proposal, RowStep, SequenceState, Source, StepRecord


def row(**fields):
    return SequenceState(0, [1, 2], 1, SamplingParams(**fields), torch.Generator())


GREEDY, SAMPLED = [row()], [row(temperature=1.0)]


def record(mode, num_tokens, seconds):
    step = RowStep(0, (5,) * num_tokens, (Source.AR,) * num_tokens)
    return StepRecord(mode, (step,), seconds=seconds)


def simulate(router, rows, speed, num_steps, *, noise=0.0, seed=0):
    """Feed the router its own plans; `speed(mode, step)` is (tokens, seconds)."""
    draw = random.Random(seed)
    history, plans = [record(Mode.PREFILL, 1, 0.5)], []
    for step in range(num_steps):
        plans.append(router.plan(rows, history))
        mode = plans[-1].mode
        tokens, seconds = speed(mode, step)
        history.append(record(mode, tokens, seconds * (1 + noise * draw.random())))
    return plans, history


def share(plans, mode):
    return sum(plan.mode == mode for plan in plans) / len(plans)


def test_routers_fit_the_contract():
    for router in (FixedRouter(3), AdaptiveRouter(3)):
        assert isinstance(router, Router)
        assert router.judge(Proposal(torch.zeros(1, 3, dtype=torch.long), (3,))) == 0


@pytest.mark.parametrize(
    ("count", "mode"), [(0, Mode.AR), (1, Mode.SPECULATIVE), (7, Mode.SPECULATIVE)]
)
def test_the_fixed_router_always_says_the_same(count, mode):
    router = FixedRouter(count)
    assert (
        router.plan(GREEDY, [])
        == router.plan(SAMPLED, [record(Mode.AR, 1, 1.0)])
        == Plan(mode, count)
    )


FAST_DRAFT = {Mode.SPECULATIVE: (4, 0.02), Mode.AR: (1, 0.01)}
SLOW_DRAFT = {Mode.SPECULATIVE: (1, 0.02), Mode.AR: (1, 0.01)}


@pytest.mark.parametrize(
    ("speeds", "winner"),
    [(FAST_DRAFT, Mode.SPECULATIVE), (SLOW_DRAFT, Mode.AR)],
    ids=["draft", "ar"],
)
def test_the_adaptive_router_takes_the_faster_side(speeds, winner):
    plans, _ = simulate(AdaptiveRouter(5), GREEDY, lambda m, s: speeds[m], 400, noise=0.3)
    assert share(plans[16:], winner) > 0.9
    loser = Mode.AR if winner is Mode.SPECULATIVE else Mode.SPECULATIVE
    assert share(plans[100:], loser) > 0, "the loser is tried again"
    assert {p.num_draft_tokens for p in plans if p.mode is Mode.SPECULATIVE} == {5}
    assert {p.num_draft_tokens for p in plans if p.mode is Mode.AR} == {0}


def test_the_adaptive_router_follows_a_change():
    def speed(mode, step):
        return (FAST_DRAFT if step >= 200 else SLOW_DRAFT)[mode]

    plans, _ = simulate(AdaptiveRouter(5), GREEDY, speed, 500)
    assert share(plans[20:200], Mode.AR) > 0.9
    assert share(plans[300:], Mode.SPECULATIVE) > 0.9


def test_a_recorded_history_replays_to_the_same_plans():
    speed = lambda mode, step: (1 + step % 4, 0.01) if mode is Mode.SPECULATIVE else (1, 0.006)  # noqa: E731
    plans, history = simulate(AdaptiveRouter(5), GREEDY, speed, 200, noise=1.0)
    assert len({plan.mode for plan in plans}) == 2
    router = AdaptiveRouter(5)
    backwards = [router.plan(GREEDY, history[: n + 1]) for n in reversed(range(len(plans)))]
    assert backwards[::-1] == plans


def test_sampled_rows_always_draft_the_same_number():
    plans, _ = simulate(AdaptiveRouter(5), SAMPLED, lambda m, s: SLOW_DRAFT[m], 50)
    assert set(plans) == {Plan(Mode.SPECULATIVE, 5)}
    slow = [record(mode, *SLOW_DRAFT[mode]) for mode in (Mode.SPECULATIVE, Mode.AR) * 8]
    assert AdaptiveRouter(5).plan(GREEDY, slow).mode is Mode.AR
    assert AdaptiveRouter(5).plan([*GREEDY, *SAMPLED], slow) == Plan(Mode.SPECULATIVE, 5)
