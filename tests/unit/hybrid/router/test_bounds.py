"""The bounds against closed forms, exact enumeration and a slow twin in fractions."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.errors import ConfigError
from hybrid.router.bounds import (
    betting_p_value,
    binomial_cdf,
    clopper_pearson_upper,
    fixed_sequence,
    hoeffding_bentkus_p_value,
    upper_bound,
)


def pmf(k, n, p):
    return math.comb(n, k) * p**k * (1 - p) ** (n - k)


@pytest.mark.parametrize(("n", "p"), [(1, 0.5), (12, 0.02), (40, 0.9)])
def test_the_binomial_tail_is_the_sum_of_its_terms(n, p):
    exact = [sum(pmf(i, n, Fraction(p)) for i in range(k + 1)) for k in range(n + 1)]
    assert [binomial_cdf(k, n, p) for k in range(n + 1)] == pytest.approx([*map(float, exact)])


def test_the_binomial_tail_does_not_underflow():
    assert binomial_cdf(40_000, 100_000, 0.4) == pytest.approx(0.5, abs=0.01)
    assert binomial_cdf(0, 100_000, 0.5) == 0.0


def test_clopper_pearson_where_it_has_a_closed_form():
    for n in (1, 10, 300):
        assert clopper_pearson_upper(0, n, 0.05) == pytest.approx(1 - 0.05 ** (1 / n))
        assert clopper_pearson_upper(n - 1, n, 0.05) == pytest.approx(0.95 ** (1 / n))
        assert clopper_pearson_upper(n, n, 0.05) == 1.0
    assert clopper_pearson_upper(0, 0, 0.05) == 1.0
    assert clopper_pearson_upper(1, 10, 0.05) == pytest.approx(0.394163, abs=1e-6)  # R, binom.test


@pytest.mark.parametrize("share", [0.02, 0.1, 0.37])
@pytest.mark.parametrize("n", [20, 150])
def test_clopper_pearson_and_hoeffding_bentkus_are_wrong_as_seldom_as_they_say(n, share):
    low = [clopper_pearson_upper(k, n, 0.05) < share for k in range(n + 1)]
    rejected = [hoeffding_bentkus_p_value(k / n, n, share) <= 0.05 for k in range(n + 1)]
    for wrong in (low, rejected):
        assert sum(pmf(k, n, share) for k in range(n + 1) if wrong[k]) <= 0.05
    assert any(rejected) == ((1 - share) ** n <= 0.05)


def test_hoeffding_bentkus_by_hand():
    assert hoeffding_bentkus_p_value(0.0, 100, 0.02) == pytest.approx(0.98**100)
    assert hoeffding_bentkus_p_value(0.02, 100, 0.02) == 1.0
    assert hoeffding_bentkus_p_value(0.5, 100, 0.02) == 1.0
    # Hoeffding: a log(a / r) + (1 - a) log((1 - a) / (1 - r)) with a = 0.01, r = 0.3.
    divergence = 0.01 * math.log(1 / 30) + 0.99 * math.log(99 / 70)
    assert hoeffding_bentkus_p_value(0.01, 50, 0.3) == pytest.approx(math.exp(-50 * divergence))
    # Bentkus is the smaller one close to the risk: e P(Bin(1000, 0.3) <= 270).
    tail = sum(pmf(k, 1000, Fraction(3, 10)) for k in range(271))
    assert hoeffding_bentkus_p_value(0.27, 1000, 0.3) == pytest.approx(math.e * float(tail))


def slow_p_value(disagreements, counts, risk, most):
    """Each stake's capital after each prompt, as fractions, from the definition."""
    r, most, capitals = Fraction(risk), Fraction(most), []
    for k in range(8):
        stake, money = Fraction(1, 2**k), [Fraction(1, 2 ** min(k + 1, 7))]
        for d, n in zip(disagreements, counts, strict=True):
            share = Fraction(d) / n if n else r
            gain = min(Fraction(n), most) / most * (r - share)
            money.append(money[-1] * (1 + stake * gain / (1 - r)))
        capitals.append(money)
    assert sum(money[0] for money in capitals) == 1
    return 1 / max(sum(column) for column in zip(*capitals, strict=True))


@pytest.mark.parametrize("most", [1, 4, 7.5, 100])
@pytest.mark.parametrize("seed", range(4))
def test_betting_equals_its_slow_twin(seed, most):
    rng = random.Random(seed)
    counts = [rng.randrange(0, 12) for _ in range(25)]
    disagreements = [n * rng.choice([0, 0, 0, 0.25, 1]) for n in counts]
    expected = slow_p_value(disagreements, counts, 0.25, most)
    assert betting_p_value(disagreements, counts, 0.25, most=most) == pytest.approx(float(expected))
    assert betting_p_value([0] * 25, counts, 0.25, most=most) < expected


# Laws of one prompt: (probability, disagreeing, tokens), E[d - n / 4] = 0: the hypothesis is true.
LAWS = {
    "all or nothing": [(1 / 4, 1, 1), (3 / 4, 0, 1)],
    "small variance": [(1 / 2, 0, 8), (1 / 2, 4, 8)],
    "long is bad": [(1 / 16, 4, 4), (3 / 4, 0, 1), (3 / 16, 0, 0)],
    "long is good": [(1 / 3, 1, 1), (1 / 4, 0, 4), (5 / 12, 0, 0)],
}


@pytest.mark.parametrize("law", LAWS, ids=str)
@pytest.mark.parametrize("length", [2, 7])
def test_betting_is_wrong_as_seldom_as_it_says(law, length):
    law = LAWS[law]
    most = max(n for _, _, n in law)
    assert sum(p * (d - n / 4) for p, d, n in law) == pytest.approx(0)
    outcomes = []
    for prompts in itertools.product(law, repeat=length):
        value = betting_p_value(
            [d for _, d, _ in prompts], [n for *_, n in prompts], 0.25, most=most
        )
        outcomes.append((value, math.prod(p for p, *_ in prompts)))
    assert min(outcomes)[0] < 1, "no bet was ever won"
    level = 0.0
    for value, probability in sorted(outcomes):  # P(p-value <= v) <= v at every v
        level += probability
        assert level <= value + 1e-9


def test_the_number_of_prompts_that_betting_needs():
    least = next(n for n in itertools.count(1) if betting_p_value([0] * n, [1] * n, 0.02) <= 0.05)
    assert least == 178
    rng = random.Random(0)
    counts = [rng.randint(10, 60) for _ in range(400)]
    rates = [rng.betavariate(1, 99) for _ in counts]
    disagree = [sum(rng.random() < p for _ in range(n)) for p, n in zip(rates, counts, strict=True)]
    mean = sum(d / n for d, n in zip(disagree, counts, strict=True)) / 400
    assert betting_p_value(disagree, counts, 0.02) <= 0.05
    assert hoeffding_bentkus_p_value(mean, 400, 0.02) > 0.05, "its variance is the worst possible"


def test_most_caps_the_say_of_a_prompt():
    one = betting_p_value([0, 1, 0], [10, 10, 30], 0.25)
    assert betting_p_value([0, 2, 0], [1, 20, 3], 0.25) == pytest.approx(one)
    assert betting_p_value([0, 0, 1, 0], [10, 0, 10, 30], 0.25) == pytest.approx(one)
    weighted = betting_p_value([0, 1, 0], [10, 10, 30], 0.25, most=30)
    assert weighted != pytest.approx(one)
    assert betting_p_value([0, 1, 0], [10, 10, 30], 0.25, most=60) > weighted
    assert betting_p_value([], [], 0.25) == betting_p_value([0], [0], 0.25) == 1.0


def test_a_bankrupt_bettor_does_not_end_the_test():
    start, clean = betting_p_value([1], [1], 0.1), betting_p_value([1] + [0] * 400, [1] * 401, 0.1)
    assert start == 1.0
    assert clean < 1e-4


prompts = st.lists(st.tuples(st.integers(1, 9), st.floats(0, 1)), min_size=1, max_size=12)


@given(prompts, st.floats(0.01, 0.99), st.floats(0.01, 0.99), st.sampled_from([1, 4, 9]))
def test_the_betting_p_value_falls_as_the_risk_grows(drawn, one, other, most):
    data = [n * share for n, share in drawn], [n for n, _ in drawn]
    low, high = sorted((one, other))
    lax = betting_p_value(*data, high, most=most)
    assert lax <= betting_p_value(*data, low, most=most) * (1 + 1e-9)


def test_the_upper_bound_inverts_a_p_value():
    data = [0, 1, 0, 0, 2] * 20, [5, 9, 3, 8, 7] * 20
    bound = upper_bound(lambda risk: betting_p_value(*data, risk, most=9), 0.05)
    assert sum(data[0]) / sum(data[1]) < bound < 1
    assert betting_p_value(*data, bound, most=9) <= 0.05
    assert betting_p_value(*data, bound - 1e-9, most=9) > 0.05
    assert upper_bound(lambda risk: 1.0, 0.05) == 1.0


@pytest.mark.parametrize(
    ("p_values", "count"),
    [([], 0), ([0.06, 0.0], 0), ([0.05], 1), ([0.01, 0.04, 0.2, 0.0], 2), ([0.0] * 5, 5)],
)
def test_fixed_sequence_stops_at_the_first_that_is_not_rejected(p_values, count):
    assert fixed_sequence(p_values, 0.05) == count


@pytest.mark.parametrize(
    "call",
    [
        lambda: betting_p_value([1], [1, 2], 0.1),
        lambda: betting_p_value([2], [1], 0.1),
        lambda: betting_p_value([math.nan], [1], 0.1),
        lambda: betting_p_value([-1], [1], 0.1),
        lambda: betting_p_value([0], [1], 0.0),
        lambda: betting_p_value([0], [1], 0.1, most=0),
        lambda: hoeffding_bentkus_p_value(1.5, 3, 0.1),
        lambda: hoeffding_bentkus_p_value(0.0, 0, 0.1),
        lambda: hoeffding_bentkus_p_value(0.0, 3, 1.0),
        lambda: clopper_pearson_upper(4, 3, 0.05),
        lambda: clopper_pearson_upper(1, 3, 0.0),
        lambda: fixed_sequence([0.1], 1.0),
    ],
)
def test_impossible_numbers_are_refused(call):
    with pytest.raises(ConfigError, match="got"):
        call()
