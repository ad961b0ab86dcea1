"""The promise about risk, simulated: calibrations of many populations, and a shift at run time.

A population is a finite list of prompts, so its true risk at each threshold is a quotient of two
sums. A calibration draws prompts from it with replacement and takes the laxest threshold that
`fixed_sequence` accepts. `risk` is set to the true risk of one of the thresholds, so that its
hypothesis is true, but only just.
"""

from __future__ import annotations

import math
import random

import pytest

from hybrid.router.bounds import betting_p_value, fixed_sequence
from hybrid.router.monitor import RiskMonitor

CALIBRATIONS, PROMPTS, DELTA, MOST = 1000, 150, 0.05, 8
# 1,000 promises of which each fails with probability 0.05 at most, and three standard deviations.
FAILURES = CALIBRATIONS * DELTA + 3 * math.sqrt(CALIBRATIONS * DELTA * (1 - DELTA))


def one_rate(rng, laxness):
    """Every token disagrees by itself."""
    n = rng.randint(1, MOST)
    return sum(rng.random() < 0.08 * laxness for _ in range(n)), n


def all_or_nothing(rng, laxness):
    """The tokens of a prompt disagree together."""
    n = rng.randint(1, MOST)
    return n * (rng.random() < 0.08 * laxness), n


def heavy_tail(rng, laxness):
    """Few prompts are very bad, most are clean."""
    rate, n = rng.betavariate(0.2, 2) * laxness / 2, rng.randint(1, MOST)
    return sum(rng.random() < rate for _ in range(n)), n


def long_is_bad(rng, laxness):
    """What is long disagrees, and a lax threshold leaves more unverified."""
    n = rng.choice([0, 1, 2, round(2 + 4 * laxness)])
    return sum(rng.random() < 0.03 * n * laxness for _ in range(n)), n


def one_wrong_token(rng, laxness):
    """Runs that end with the first disagreement."""
    for n in range(1, MOST + 1):
        if rng.random() < 0.12 * laxness:
            return 1, n
    return 0, MOST


LAWS = (one_rate, all_or_nothing, heavy_tail, long_is_bad, one_wrong_token)
IDS = [law.__name__ for law in LAWS]


def population(law, laxnesses, seed=0):
    """[thresholds][1,000 prompts] of (disagreeing, unverified), and the true risk of each."""
    rng = random.Random(f"{law.__name__}-{seed}")
    columns = [[law(rng, laxness) for _ in range(1000)] for laxness in laxnesses]
    return columns, [sum(d for d, _ in c) / sum(n for _, n in c) for c in columns]


def calibrations(columns, p_value, seed):
    """Yield how many thresholds each of the simulated calibrations accepts."""
    rng = random.Random(seed)
    for _ in range(CALIBRATIONS):
        drawn = rng.choices(range(1000), k=PROMPTS)
        data = [zip(*[column[i] for i in drawn], strict=True) for column in columns]
        yield fixed_sequence([p_value(*pair) for pair in data], DELTA)


def failures(columns, true, risk, p_value, seed):
    """Count the calibrations whose laxest accepted threshold has a true risk of `risk` or more."""
    accepted = calibrations(columns, p_value, seed)
    return sum(1 for count in accepted if count and max(true[:count]) >= risk)


@pytest.mark.parametrize("law", LAWS, ids=IDS)
@pytest.mark.parametrize("at", [0, 2])
def test_the_promise_fails_in_one_of_twenty_calibrations_at_most(law, at):
    columns, true = population(law, (0.5, 0.9, 1.5))
    risk = true[at]
    bad = failures(
        columns, true, risk, lambda d, n: betting_p_value(d, n, risk, most=MOST), seed=at
    )
    assert bad <= FAILURES


def test_the_hardest_law_is_a_rare_disaster():
    """A sample that is clean by luck looks like no risk at all; it is drawn in 1 of 40 cases."""
    columns, true = [[(MOST, MOST)] * 25 + [(0, MOST)] * 975], [0.025]
    p_value = lambda d, n: betting_p_value(d, n, true[0], most=MOST)  # noqa: E731
    assert 0 < failures(columns, true, true[0], p_value, seed=7) <= FAILURES


@pytest.mark.parametrize("law", LAWS, ids=IDS)
def test_it_holds_for_the_mean_share_of_a_prompt_too(law):
    columns, _ = population(law, (1.0,))
    shares = [d / n for d, n in columns[0] if n]
    risk = sum(shares) / len(shares)
    bad = failures(columns, [risk], risk, lambda d, n: betting_p_value(d, n, risk), seed=3)
    assert bad <= FAILURES


def test_a_risk_that_does_not_rise_with_the_threshold_is_no_way_around_it():
    columns, true = population(one_rate, (0.6, 2.0, 0.3, 0.3))
    risk = true[1]
    bad = failures(columns, true, risk, lambda d, n: betting_p_value(d, n, risk, most=MOST), seed=4)
    assert true[2] < risk / 3
    assert bad <= FAILURES


def test_taking_the_observed_share_for_the_risk_fails_far_more_often():
    """The simulation has teeth: without a bound the promise fails in half of the calibrations."""
    columns, true = population(heavy_tail, (1.0,))
    observed = lambda d, n: float(sum(d) > true[0] * sum(n))  # noqa: E731
    assert failures(columns, true, true[0], observed, seed=5) > 5 * FAILURES


@pytest.mark.parametrize("law", LAWS, ids=IDS)
def test_it_accepts_what_is_far_from_the_risk(law):
    """At an eighth of the risk, most calibrations accept."""
    columns, true = population(law, (0.25, 1.0))
    risk = 8 * true[0]
    chosen = [*calibrations(columns, lambda d, n: betting_p_value(d, n, risk, most=MOST), seed=6)]
    assert sum(count >= 1 for count in chosen) > 0.8 * CALIBRATIONS


LEVELS = (0.3, 0.6, 1.0)  # the laxness of three thresholds; disagreement is proportional to it
CHAT, CODE, RISK = 0.010, 0.040, 0.02  # what disagrees at the laxest


def runtime(mean, num_steps, monitor, seed):
    """Return the (unverified, disagreeing) of a run; with no monitor the laxest level is trusted.

    A prompt is 40 tokens that share one rate, so they depend on each other.
    """
    rng, unverified, disagreeing, rate = random.Random(seed), 0, 0, 0.0
    for step in range(num_steps):
        if step % 10 == 0:
            rate = rng.betavariate(1, 1 / mean - 1)
        level = len(LEVELS) - 1 if monitor is None else monitor.level
        count = 4 if monitor is None else min(4, monitor.num_allowed)
        bad = sum(rng.random() < rate * LEVELS[level] for _ in range(count)) if count else 0
        unverified, disagreeing = unverified + count, disagreeing + bad
        if monitor is not None:
            monitor = monitor.observe(count, bad)
            if monitor.trial is not None and count < 4:
                on_trial = rate * LEVELS[monitor.trial]
                checks = 4 - count
                wrong = sum(rng.random() < on_trial for _ in range(checks))
                monitor = monitor.observe_checked(checks, wrong)
    return unverified, disagreeing, monitor


@pytest.mark.parametrize("code", [0.03, CODE, 0.05], ids=["3x", "4x", "5x"])
def test_calibrated_on_chat_and_run_on_code_the_promise_still_holds(code):
    rng, data = random.Random(9), []
    for scale in LEVELS:
        rates = [rng.betavariate(1, 1 / CHAT - 1) * scale for _ in range(500)]
        data.append([sum(rng.random() < rate for _ in range(40)) for rate in rates])
    p_values = [betting_p_value(d, [40] * 500, RISK, most=40) for d in data]
    accepted = fixed_sequence(p_values, DELTA)
    assert accepted == len(LEVELS), "on chat all thresholds keep the promise"
    for seed in range(5):
        unverified, disagreeing, _ = runtime(code, 1500, None, seed)
        assert disagreeing > 1.2 * RISK * unverified, "without the monitor it is broken"
        monitor = RiskMonitor.start(RISK, accepted)
        unverified, disagreeing, monitor = runtime(code, 1500, monitor, seed)
        assert (unverified, disagreeing) == (monitor.unverified, monitor.disagreeing)
        assert disagreeing <= RISK * unverified + monitor.allowance * monitor.accounts
        assert monitor.level != accepted - 1, "it noticed"


def test_on_what_was_calibrated_the_monitor_stays_out_of_the_way():
    kept = []
    for seed in range(10):
        unverified, disagreeing, monitor = runtime(CHAT, 1500, RiskMonitor.start(RISK, 3), seed)
        assert disagreeing <= RISK * unverified
        kept.append(unverified / 6000)
    assert sum(kept) / 10 > 0.95
