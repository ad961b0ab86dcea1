"""The monitor's promise on adversarial sequences, its alarm by hand and by simulation."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.errors import ConfigError
from hybrid.router.monitor import RiskMonitor

MANY = 1e6  # an allowance that never binds: the alarm alone


def within_promise(m):
    """What holds on any sequence, recomputed from its statement."""
    account = m.disagreeing <= m.risk * m.unverified + m.allowance * m.accounts + 1e-9
    return account and (m.accounts - 1) * 2 * -math.log(m.delta) <= m.checked * m.risk + 1e-9


steps = st.lists(
    st.tuples(st.booleans(), st.floats(0, 1), st.integers(0, 600), st.floats(0, 1)), max_size=60
)


@given(
    steps, st.floats(0.005, 0.5), st.integers(0, 4), st.floats(1, 9), st.sampled_from([0.01, 0.4])
)
def test_the_promise_holds_on_any_sequence(steps, risk, num_levels, allowance, delta):
    monitor = RiskMonitor.start(risk, num_levels, delta=delta, allowance=allowance)
    for is_checked, part, length, bad in steps:
        if is_checked:  # shares of 0 and 1 are likely draws
            monitor = monitor.observe_checked(length, bad**8 * length)
        else:
            count = round(part * monitor.num_allowed)
            monitor = monitor.observe(count, bad * count)
        assert within_promise(monitor)


def test_the_promise_holds_against_the_greediest_adversary():
    """It passes the checks just so, commits all that it may, and then everything is wrong."""
    monitor = RiskMonitor.start(0.02, 3)
    spent = 0
    for _ in range(3000):
        count = monitor.num_allowed
        if count:
            monitor = monitor.observe(count, count)
            spent += count
        else:
            monitor = monitor.observe_checked(1, 0)
        assert within_promise(monitor)
    assert monitor.accounts > 5
    assert spent == monitor.disagreeing > 0.9 * monitor.allowance * monitor.accounts, "it is tight"


def test_the_account_by_hand():
    monitor = RiskMonitor.start(0.1, 1, allowance=2)
    assert monitor.num_allowed == 2  # 2 / 0.9
    monitor = monitor.observe(2, 0)
    assert monitor.num_allowed == 2  # 2.2 / 0.9
    monitor = monitor.observe(1, 1)
    assert monitor.num_allowed == 1  # 1.3 / 0.9
    monitor = monitor.observe(1, 1)
    assert (monitor.num_allowed, monitor.level) == (0, None)  # 0.4 / 0.9
    assert monitor.observe(50, 0).num_allowed == 0, "only checks restore trust"


def test_the_alarm_by_hand():
    monitor = RiskMonitor.start(0.02, 3, allowance=MANY)
    # log 20 = 2.996; five disagreements give 5 log 2 = 3.466, less 0.02 a token: 23 tokens.
    assert monitor.observe(23, 5).level == 1
    assert monitor.observe(24, 5).level == 2
    once = monitor.observe(20, 4).observe(3, 1)
    assert (once.level, once.alarm) == (1, 0.0)
    assert (once.unverified, once.disagreeing) == (23, 5)
    twice = once.observe(5, 5)
    assert (twice.level, twice.observe(5, 5).level) == (0, None)


def test_trust_by_hand():
    monitor = RiskMonitor.start(0.02, 2).observe(6, 6)
    assert (monitor.level, monitor.trial) == (None, 0)
    # 0.01 a checked token up to 2.996, less log 2 for each disagreement.
    assert monitor.observe_checked(299, 0).level is None
    assert monitor.observe_checked(100, 1).trust == pytest.approx(1 - math.log(2))
    worse = monitor.observe_checked(1000, 50)
    assert (worse.level, worse.trust) == (None, 0.0)
    restored = monitor.observe_checked(200, 0).observe_checked(100, 0)
    assert (restored.level, restored.trial, restored.accounts) == (0, 1, 2)
    assert restored.num_allowed == 6  # (6 + 0.12) / 0.98
    relaxed = restored.observe_checked(300, 0)
    assert (relaxed.level, relaxed.trial, relaxed.accounts) == (1, None, 2)
    assert relaxed.observe_checked(300, 300) == relaxed, "nothing is on trial"


def chance(rng, past):
    """Conditional probabilities that wander with the past; they average 0.1 exactly at evens."""
    return (
        0.0 if len(past) % 2 else 0.2 if len(past) < 2 or not past[-2] else rng.choice([0.1, 0.2])
    )


def test_the_alarm_is_false_as_seldom_as_it_says():
    rng, alarms, runs = random.Random(5), 0, 400
    for _ in range(runs):
        monitor, past, expected = RiskMonitor.start(0.1, 2, allowance=MANY), [], 0.0
        for _ in range(60):
            bad = 0
            for _ in range(4):
                p = chance(rng, past)
                expected += p
                past.append(rng.random() < p)
                bad += past[-1]
            monitor = monitor.observe(4, bad)
            if monitor.level != 1:
                alarms += expected <= 0.1 * len(past) + 1e-9
                break
    assert 0 < alarms <= runs * 0.05 + 3 * math.sqrt(runs * 0.05 * 0.95)


def test_the_alarm_notices_four_times_the_risk():
    rng, needed = random.Random(6), []
    for _ in range(50):
        monitor = RiskMonitor.start(0.02, 2, allowance=MANY)
        while monitor.level == 1:
            monitor = monitor.observe(4, sum(rng.random() < 0.08 for _ in range(4)))
        needed.append(monitor.unverified)
    assert sorted(needed)[45] < 250


def test_without_a_calibrated_level_nothing_is_committed_unverified():
    monitor = RiskMonitor.start(0.02, 0)
    assert (monitor.level, monitor.trial, monitor.num_allowed) == (None, None, 0)
    assert monitor.observe_checked(10_000, 0) == monitor


def test_a_recorded_run_replays_from_any_point_of_it():
    rng = random.Random(7)
    record = [(rng.randrange(5), rng.random() ** 3) for _ in range(200)]

    def fold(monitor, record):
        for count, part in record:
            monitor = monitor.observe(count, part * count).observe_checked(count * 20, part * count)
        return monitor

    whole = fold(RiskMonitor.start(0.1, 4), record)
    assert whole.accounts > 1
    half = json.loads(json.dumps(fold(RiskMonitor.start(0.1, 4), record[:100]).model_dump()))
    assert fold(RiskMonitor(**half), record[100:]) == whole


@pytest.mark.parametrize(
    "call",
    [
        lambda: RiskMonitor.start(0.0, 2),
        lambda: RiskMonitor.start(0.1, -1),
        lambda: RiskMonitor.start(0.1, 2, allowance=0),
        lambda: RiskMonitor.start(0.1, 2, patience=3),
        lambda: RiskMonitor(risk=0.1, num_levels=2, level=2),
        lambda: RiskMonitor.start(0.1, 2).observe(2, 3),
        lambda: RiskMonitor.start(0.1, 2).observe(2, -1),
        lambda: RiskMonitor.start(0.1, 2).observe_checked(2, math.nan),
    ],
)
def test_impossible_numbers_are_refused(call):
    with pytest.raises(ConfigError):
        call()
