"""The router on machines whose costs and drafts are known."""

from __future__ import annotations

import random
import sys
from collections import Counter
from statistics import median

import pytest
from router_simulation import Machine, honest, hostile, linear, row

from hybrid.errors import ConfigError
from hybrid.protocols import Router
from hybrid.router.config import RouterConfig
from hybrid.router.cost import CostModel, StepShape, warm_up
from hybrid.router.fixed import FixedRouter
from hybrid.router.hybrid import Draft, HybridRouter
from hybrid.router.monitor import RiskMonitor
from hybrid.router.profile import Profile, Threshold
from hybrid.types import Mode

# A carried group costs a pass of its own, or next to nothing; a wide pass is free, or is not.
CPU, GPU = linear(), linear(group=0.2)
FREE, CHEAP_DRAFT = linear(group=0.2, token=0.05), linear(draft=1.0)
MACHINES = {"cpu": CPU, "gpu": GPU, "free width": FREE, "cheap draft": CHEAP_DRAFT}
GOOD = honest((0.68, 0.8, 0.78, 0.8, 0.8, 0.8, 0.8, 0.8))


def router(ms=CPU, count=7, rows=1, **fields):
    config = RouterConfig(num_draft_tokens=count, **fields)
    return HybridRouter(config, warm_up(ms, rows, count, count + 1))


def run(draw, ms, count=7, *, num_tokens=256, rows=1, seed=0, noise=0.0, **fields):
    batch = [row(i, 2048) for i in range(rows)]
    machine = Machine(router(ms, count, rows, **fields), batch, draw, ms, seed=seed, noise=noise)
    return machine.run(num_tokens + 1)


def slowdown(machine):
    """Time per token of a row, in AR steps."""
    rows = len(machine.rows)
    return 1000 * machine.seconds * rows / (machine.num_tokens * machine.ms(StepShape(rows)))


def profile(*thresholds, risk=0.02, **fields):
    evidence = {"num_prompts": 100, "num_tokens": 1000, "disagreements": 5.0, "p_value": 0.01}
    found = tuple(Threshold(threshold=threshold, **evidence) for threshold in thresholds)
    return Profile(model="m", domain="d", risk=risk, thresholds=found, **fields)


def test_it_fits_the_contract():
    made = router()
    assert isinstance(made, Router)
    assert (made.num_slots, made.max_points, made.wants_features) == (8, 8, True)
    fused = router(modes=(Mode.SPECULATIVE, Mode.FUSED))
    assert (fused.num_slots, fused.max_points) == (8, 1)
    two_pass = router(modes=(Mode.SPECULATIVE,))
    assert (two_pass.num_slots, two_pass.max_points) == (0, 0)


@pytest.mark.parametrize("count", [3, 7])
@pytest.mark.parametrize("machine", MACHINES)
def test_a_drafter_that_is_always_wrong_costs_at_most_three_percent(machine, count):
    ms = MACHINES[machine]
    assert ms(StepShape(1)) == 7.7
    assert slowdown(run(hostile, ms, count, num_tokens=64)) <= 1.03
    long = run(hostile, ms, count, num_tokens=512)
    assert slowdown(long) <= 1.015, "trials become rarer"
    assert long.share(Mode.SPECULATIVE, Mode.FUSED, Mode.ONE_PASS, after=100) > 0, "but go on"


@pytest.mark.parametrize("count", [3, 7])
@pytest.mark.parametrize("machine", MACHINES)
def test_it_is_about_as_fast_as_the_best_fixed_mode_of_each_machine(machine, count):
    ms, seeds = MACHINES[machine], range(6)

    def fixed(mode, seed):
        made = FixedRouter(count, mode)
        return slowdown(Machine(made, [row(0, 2048)], GOOD, ms, seed=seed).run(385))

    own = sum(slowdown(run(GOOD, ms, count, num_tokens=384, seed=s)) for s in seeds)
    modes = (Mode.SPECULATIVE, Mode.FUSED, Mode.ONE_PASS)
    speeds = {mode: sum(fixed(mode, seed) for seed in seeds) for mode in modes}
    # It begins without knowing anything, and goes on trying what is worse.
    assert own <= 1.12 * min(speeds.values())
    assert own < 0.9 * max(speeds.values())


def test_slots_are_carried_where_that_is_cheaper_than_a_pass():
    assert run(GOOD, CPU).share(Mode.FUSED, Mode.ONE_PASS) < 0.1
    assert run(GOOD, GPU).share(Mode.FUSED, Mode.ONE_PASS) > 0.8


def test_a_machine_under_load_gets_narrower_steps():
    loaded = linear(token=1.5, group=2.0)

    def width(ms, rows):
        machine = run(GOOD, ms, rows=rows, num_tokens=128)
        steps = [r.rows[0].num_drafted for r in machine.history[rows + 20 :]]
        return sum(steps) / len(steps)

    assert width(linear(token=0.02, group=0.02), 1) > 2 * width(loaded, 8)


def test_it_follows_a_drafter_that_becomes_good():
    good_from = 120
    calls = []

    def draw(rng, slot):
        calls.append(slot)
        return GOOD(rng, slot) if machine.num_tokens > good_from else hostile(rng, slot)

    machine = Machine(router(), [row(0, 2048)], draw, CPU)
    machine.run(600)
    assert calls
    assert machine.share(Mode.AR, after=400) < 0.4
    assert slowdown(machine) < 0.95


def test_wrong_costs_are_noticed():
    made = HybridRouter(
        RouterConfig(num_draft_tokens=7, modes=(Mode.SPECULATIVE,)),
        warm_up(linear(draft=20.0), 1, 7, 0),
    )
    machine = Machine(made, [row(0, 2048)], GOOD, linear(draft=1.0)).run(1500)
    assert machine.share(Mode.SPECULATIVE, after=300) > 0.6


@pytest.mark.parametrize("count", [3, 7])
def test_a_recorded_history_replays_from_anywhere(count):
    machine = run(GOOD, GPU, count, num_tokens=120, rows=2, noise=0.3)
    first = len(machine.rows)
    for step in (0, 1, 7, len(machine.plans) - 1):
        cold = router(GPU, count, 2)
        for own in machine.rows:  # as they were before the step
            kept = 4 + sum(
                len(r.tokens)
                for record in machine.history[first : first + step]
                for r in record.rows
                if r.index == own.row
            )
            own.tokens[kept:] = []
        history = machine.history[: first + step]
        assert cold.plan(machine.rows, history) == machine.plans[step]
        rows = machine.history[first + step].rows
        drafts = [Draft(r.num_proposed, r.first_slot, r.confidences) for r in rows]
        drafting = machine.history[first + step].num_drafting
        assert cold.route(machine.rows, drafts, drafting, history) == machine.routes[step]
        machine = run(GOOD, GPU, count, num_tokens=120, rows=2, noise=0.3)


def test_another_call_begins_anew():
    made = router()
    first = Machine(made, [row(0, 2048)], GOOD, CPU).run(60)
    second = Machine(made, [row(0, 2048)], GOOD, CPU).run(60)
    assert first.routes == second.routes


@pytest.mark.parametrize(
    "fields",
    [{"temperature": 1.0}, {"temperature": 0.0}],
    ids=["sampled", "greedy with risk"],
)
def test_what_must_not_follow_clock_or_batch_does_not(fields):
    config = RouterConfig(num_draft_tokens=5, risk=0.0 if fields["temperature"] else 0.05)
    own = profile(0.9, 0.7, risk=0.05) if config.risk else None

    def choices(ms, batch, noise):
        rows = [row(0, 100, **fields), *(row(i, 60, **batch) for i in range(1, 4) if batch)]
        made = HybridRouter(config, warm_up(ms, len(rows), 5, 6), own)
        machine = Machine(made, rows, GOOD, ms, noise=noise).run(100)
        return [
            (r.num_proposed, r.first_slot, r.num_drafted, r.num_unverified, r.points)
            for record in machine.history[len(rows) :]
            for r in record.rows
            if r.index == 0
        ]

    alone = choices(CPU, {}, 0.0)
    assert len({fed for _, _, fed, _, _ in alone}) > 1, "the cut varies"
    assert choices(FREE, {}, 1.0) == alone
    assert choices(GPU, {"temperature": 0.0}, 0.5) == alone
    assert choices(GPU, {"temperature": 2.0}, 0.5) == alone


def test_sampled_rows_are_drafted_with_the_same_number_or_not_at_all():
    machine = Machine(router(count=5), [row(0, 100, temperature=1.0)], hostile, CPU).run(100)
    assert {plan.num_draft_tokens for (plan,) in machine.plans} <= {0, 5}
    assert all(plan.may_draft for (plan,) in machine.plans if plan.num_draft_tokens)


def test_the_passes_of_forwards_are_counted_not_timed():
    def choices(ms, noise):
        return run(GOOD, ms, 5, num_tokens=80, noise=noise, cost="forwards").routes

    assert choices(CPU, 0.0) == choices(FREE, 1.0)
    machine = run(GOOD, FREE, 5, num_tokens=200, cost="forwards")
    assert machine.share(Mode.ONE_PASS) > 0.8, "carried slots cost no pass"


def test_trusted_tokens_are_committed_unverified_and_only_those():
    config = RouterConfig(num_draft_tokens=5, risk=0.1, cost="forwards")
    made = HybridRouter(config, profile=profile(0.9, 0.8, risk=0.1))
    machine = Machine(made, [row(0, 300)], honest((0.95,) * 8), GPU).run(300)
    steps = [r for record in machine.history[1:] for r in record.rows]
    assert sum(s.num_unverified for s in steps) > 100
    for step, (explanation,) in zip(steps, machine.explanations, strict=True):
        level = explanation.level
        sure = step.num_unverified
        least = 2.0 if level is None else made.profile.thresholds[level].threshold
        assert all(confidence >= least for confidence in step.confidences[:sure])
        assert step.mode is Mode.DIFFUSION_ONLY or not sure
        if step.points:
            assert min(step.points) >= sure, "a group for fewer tokens could never be used"
    for allowed in ((Mode.SPECULATIVE, Mode.FUSED), (Mode.SPECULATIVE,)):
        made = HybridRouter(config.replace(modes=allowed), profile=profile(0.8, risk=0.1))
        machine = Machine(made, [row(0, 60)], honest((0.95,) * 8), GPU).run(60)
        assert not any(r.num_unverified for record in machine.history for r in record.rows)


def test_where_confidences_lie_the_monitor_returns_to_verifying():
    risk, made = 0.05, None
    config = RouterConfig(num_draft_tokens=4, risk=risk, cost="forwards")
    made = HybridRouter(config, profile=profile(0.95, 0.8, risk=risk))

    def lying(rng, slot):
        return 0.97, rng.random() < 0.6

    machine = Machine(made, [row(0, 800)], lying, GPU).run(800)
    steps = [r for record in machine.history[1:] for r in record.rows]
    unverified = sum(s.num_unverified for s in steps)
    disagreeing = sum(sum(s.disagreements) for s in steps)
    allowance = RiskMonitor.start(risk, 1).allowance
    assert 0 < disagreeing <= risk * unverified + allowance
    assert machine.explanations[-1][0].level is None
    assert not any(s.num_unverified for s in steps[-100:])


def test_the_last_tokens_of_a_row_are_not_drafted_beyond():
    for budget in (2, 3, 5):
        machine = Machine(router(), [row(0, budget)], lambda rng, slot: (1.0, True), CPU).run(
            budget
        )
        assert machine.rows[0].num_new_tokens == budget
        for record in machine.history[1:]:
            (step,) = record.rows
            assert step.num_accepted + 1 == len(step.tokens), "nothing was cut off"


def test_a_row_that_can_take_one_token_is_not_drafted():
    made, own = router(), row(0, 4)
    own.tokens += [5, 5, 5]
    (plan,) = made.plan([own], [])
    assert plan.num_draft_tokens == 0


def test_counts_of_a_profile_are_where_a_call_begins():
    taught = run(GOOD, CPU, num_tokens=500).router
    counts = taught._shared.acceptance.to_dict()
    known = profile(0.9, acceptance=counts)
    config = RouterConfig(num_draft_tokens=7)

    def share(own):
        total = 0.0
        for seed in range(8):
            made = HybridRouter(config, warm_up(CPU, 1, 7, 8), own)
            total += Machine(made, [row(0, 2048)], GOOD, CPU, seed=seed).run(64).share(Mode.AR)
        return total

    assert share(known) < 0.7 * share(None)


@pytest.mark.parametrize(
    "call",
    [
        lambda: HybridRouter(RouterConfig(num_draft_tokens=3, risk=0.1)),
        lambda: RouterConfig(num_draft_tokens=0),
        lambda: RouterConfig(num_draft_tokens=3, modes=(Mode.DIFFUSION,)),
        lambda: RouterConfig(num_draft_tokens=3, cost="free"),
        lambda: HybridRouter.from_header({"config": {"num_draft_tokens": 3}}),
    ],
)
def test_what_cannot_be_routed_is_refused(call):
    with pytest.raises(ConfigError):
        call()


def test_the_parts_that_it_is_given_stay_as_they_are():
    costs = warm_up(CPU, 1, 7, 8)
    before = costs.to_dict()
    made = HybridRouter(RouterConfig(num_draft_tokens=7), costs)
    Machine(made, [row(0, 2048)], GOOD, linear(target=20.0)).run(60)
    assert costs.to_dict() == before
    assert made.costs.ms(StepShape(1)) > 1.5 * costs.ms(StepShape(1))
    assert isinstance(made.costs, CostModel)


def test_deciding_takes_few_calls_a_step_and_no_more_as_the_history_grows():
    """Calls of Python and C, for a clock depends on the machine: 550 are 0.1 ms on a slow core."""
    machine = run(GOOD, GPU, num_tokens=300)
    cold, own, history, counts = router(GPU), row(0, 2048), machine.history[:1], []
    own.tokens.append(4)
    for record in machine.history[1:]:
        (step,) = record.rows
        drafts = [Draft(step.num_proposed, step.first_slot, step.confidences)]
        events = Counter()
        sys.setprofile(lambda _frame, event, _arg, events=events: events.update([event]))
        cold.plan([own], history)
        cold.route([own], drafts, record.num_drafting, history)
        sys.setprofile(None)
        counts.append(events["call"] + events["c_call"])
        history.append(record)
        own.tokens.extend(step.tokens)
    half = len(counts) // 2
    assert median(counts) < 700
    assert median(counts[half:]) <= median(counts[:half])


def test_simulated_drafts_are_what_they_claim():
    rng = random.Random(3)
    guesses = [GOOD(rng, 1) for _ in range(4000)]
    assert sum(right for _, right in guesses) / 4000 == pytest.approx(0.68, abs=0.03)
    sure = [right for confidence, right in guesses if confidence > 0.9]
    assert sum(sure) / len(sure) > 0.9
