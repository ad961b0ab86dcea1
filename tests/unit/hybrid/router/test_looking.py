"""Looking at a draft before it is fed: only where it is worth the wait for the device."""

from __future__ import annotations

import math
from statistics import mean
from unittest import mock

import pytest
import torch
from router_simulation import Machine, honest, hostile, linear, row

from hybrid.router import hybrid
from hybrid.router.config import RouterConfig
from hybrid.router.cost import CostModel, warm_up
from hybrid.router.explain import describe, reasons
from hybrid.router.hybrid import HybridRouter
from hybrid.router.memory import Memory
from hybrid.router.profile import Profile, Threshold
from hybrid.router.record import RunHeader, replay
from hybrid.types import Mode, Proposal

# Of a token that is sure or not, the confidence tells much; where width is free it changes nothing.
TELLING = honest((0.5,) * 8)


def noise(rng, slot):
    """A confidence that tells nothing."""
    return rng.random(), rng.random() < 0.7


WIDTH_COSTS, WIDTH_IS_FREE = linear(token=1.1, draft=1.0), linear(token=0.01, draft=1.0)
TWO_PASS = (Mode.SPECULATIVE,)


def run(ms, look_ms, draw=TELLING, *, rows=1, num_tokens=400, seed=0, modes=TWO_PASS, **sampling):
    config = RouterConfig(num_draft_tokens=7, modes=modes)
    made = HybridRouter(config, warm_up(ms, rows, 7, 8 if modes != TWO_PASS else 0, look_ms))
    batch = [row(i, 2048, **sampling) for i in range(rows)]
    return Machine(made, batch, draw, ms, look_ms=look_ms, seed=seed).run(num_tokens)


def share_looked(machine, after=0):
    """Of the steps with a draft, how many looked at it."""
    drafted = zip(machine.explanations, machine.history[len(machine.rows) :], strict=True)
    looked = [
        own[0].has_looked for own, record in drafted if any(s.num_proposed for s in record.rows)
    ]
    return mean(looked[after:])


def time_per_token(machine):
    return 1000 * machine.seconds / machine.num_tokens


def test_where_the_host_has_the_draft_it_is_looked_at():
    machine = run(WIDTH_IS_FREE, 0.0)
    assert share_looked(machine) == 1
    assert machine.router._shared._num_insights == 0, "and nothing is computed to decide that"


def test_it_is_looked_at_where_that_pays_and_only_there():
    assert share_looked(run(WIDTH_COSTS, 0.02), after=10) > 0.95
    assert share_looked(run(WIDTH_COSTS, 5.0), after=10) == 0
    assert share_looked(run(WIDTH_IS_FREE, 0.05), after=10) == 0


@pytest.mark.parametrize("draw", [TELLING, noise], ids=["telling", "noise"])
@pytest.mark.parametrize("ms", [WIDTH_COSTS, WIDTH_IS_FREE], ids=["width costs", "width is free"])
@pytest.mark.parametrize("look_ms", [0.02, 0.3, 3.0])
def test_that_is_as_fast_as_the_better_of_always_and_never(ms, look_ms, draw):
    def speed():
        runs = (run(ms, look_ms, draw, num_tokens=500, seed=seed) for seed in range(4))
        return sum(map(time_per_token, runs))

    own, fixed = speed(), {}
    for looks in (True, False):
        with mock.patch.object(Memory, "looks", looks):
            fixed[looks] = speed()
    assert own <= 1.04 * min(fixed.values())
    if look_ms == 3.0:
        assert own < 0.97 * fixed[True], "there is something to gain"


def test_without_a_look_it_is_routed_by_what_is_usual():
    """What the draft says of itself changes nothing, in the step."""
    machine = run(WIDTH_IS_FREE, 3.0)
    made, history, rows = machine.router, machine.history, machine.rows
    made.plan(rows, history)
    routes = []
    for confidence in (0.01, 0.99):
        tokens = torch.zeros(1, 7, dtype=torch.long)
        sure = torch.full((1, 7), confidence)
        draft = Proposal(tokens, (7,), confidence=sure, first_slot=(1,), num_forwards=1)
        with mock.patch.object(hybrid, "read", side_effect=AssertionError("it was read")):
            routes.append(made.judge(rows, draft, history))
    assert routes[0] == routes[1]
    assert routes[0][0].num_draft_tokens > 0


@pytest.mark.parametrize("modes", [TWO_PASS, RouterConfig(num_draft_tokens=1).modes])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_recorded_run_replays_though_its_certainty_is_known_by_then(modes, temperature):
    look_ms = 2.0
    config = RouterConfig(num_draft_tokens=7, modes=modes)
    costs = warm_up(WIDTH_COSTS, 2, 7, 8 if modes != TWO_PASS else 0, look_ms)
    made = HybridRouter(config, costs, _profile(costs))
    batch = [row(i, 200, temperature=temperature) for i in range(2)]
    header = RunHeader.of(batch, made)
    machine = Machine(made, batch, TELLING, WIDTH_COSTS, look_ms=look_ms).run(200)
    decisions = list(replay(header, machine.history))
    assert all(decision.agrees for decision in decisions)
    seen = {own.has_looked for decision in decisions for own in decision.explanations}
    assert False in seen
    assert {reason["has_looked"] for reason in reasons(decisions)} == seen
    assert any("by usual odds" in line for line in describe(header, decisions))


def test_a_sampled_row_looks_by_its_own_records_and_frozen_costs():
    """Whatever shares its batch, however long a look takes on this machine."""

    def looks(look_ms, batch):
        config = RouterConfig(num_draft_tokens=7, modes=TWO_PASS)
        stored = warm_up(WIDTH_COSTS, 1, 7, 0, 2.0)
        costs = warm_up(WIDTH_COSTS, len(batch) + 1, 7, 0, look_ms)
        made = HybridRouter(config, costs, _profile(stored))
        rows = [row(0, 200, temperature=1.0), *batch]
        machine = Machine(made, rows, TELLING, WIDTH_COSTS, look_ms=look_ms).run(150)
        found = (own for step in machine.explanations for own in step if own.rows == (0,))
        return [own.has_looked for own in found][:60]

    alone = looks(0.3, [])
    assert len(set(alone)) == 2
    assert looks(9.0, []) == alone
    assert looks(0.0, [row(1, 400), row(2, 400, temperature=0.5)]) == alone


def test_what_is_trusted_unverified_is_always_looked_at():
    costs = warm_up(WIDTH_COSTS, 1, 7, 0, 50.0)
    modes = (Mode.SPECULATIVE, Mode.DIFFUSION_ONLY)
    config = RouterConfig(num_draft_tokens=7, risk=0.05, modes=modes)
    made = HybridRouter(config, None, _profile(costs, risk=0.05))
    machine = Machine(made, [row(0, 200)], honest((0.97,) * 8), WIDTH_COSTS).run(200)
    assert share_looked(machine) == 1
    assert any(s.num_unverified for record in machine.history for s in record.rows)


def test_copies_tell_nothing_of_themselves():
    """Nobody knows how sure they are, so there is no insight in them."""
    machine = run(WIDTH_COSTS, 0.3, lambda rng, slot: (math.nan, rng.random() < 0.5))
    assert machine.num_tokens >= 399
    assert any(step.num_drafted for record in machine.history for step in record.rows)
    assert machine.router._shared._num_insights == 0


def test_a_step_without_a_draft_has_nothing_to_look_at():
    machine = run(WIDTH_COSTS, 3.0, hostile)
    bare = [
        own[0].has_looked
        for own, record in zip(machine.explanations, machine.history[1:], strict=True)
        if not any(step.num_proposed for step in record.rows)
    ]
    assert len(bare) > 50
    assert all(bare)


def test_the_cost_of_a_look_is_kept():
    costs = warm_up(WIDTH_COSTS, 1, 7, 0, 0.25)
    assert costs.look_ms == 0.25
    assert CostModel.from_dict(costs.to_dict()).look_ms == 0.25
    old = {name: value for name, value in costs.to_dict().items() if name != "look_ms"}
    assert CostModel.from_dict(old).look_ms == 0, "profiles of before have none"
    assert CostModel.forwards().look_ms == CostModel.guess().look_ms == 0


def _profile(costs, risk=0.02):
    evidence = {"num_prompts": 100, "num_tokens": 1000, "disagreements": 5.0, "p_value": 0.01}
    levels = (Threshold(threshold=0.9, **evidence),)
    return Profile(model="m", domain="d", risk=risk, thresholds=levels, costs=costs.to_dict())
