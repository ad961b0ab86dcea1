"""Pool adjacent violators against the min-max formula, which is its definition."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.errors import ConfigError
from hybrid.router.isotonic import IsotonicCurve, fit_isotonic


def slow(data, score):
    """max over starts up to `score` of the min over ends from it of the weighted mean between."""
    knots = sorted({s for s, *_ in data})

    def mean(start, end):
        part = [(a, w) for s, a, w in data if start <= s <= end]
        return sum(a * w for a, w in part) / sum(w for _, w in part)

    starts = [s for s in knots if s <= score]
    return max(min(mean(start, end) for end in knots if end >= score) for start in starts)


points = st.tuples(
    st.integers(0, 8), st.sampled_from([0.0, 0.3, 1.0]), st.sampled_from([0.5, 1, 3])
)


@given(st.lists(points, min_size=1, max_size=14))
def test_the_curve_is_the_least_squares_one(data):
    curve = fit_isotonic(*zip(*data, strict=True))
    for score in {s for s, *_ in data}:
        assert curve(score) == pytest.approx(slow(data, score))


def test_by_hand():
    # 0.1: 0; 0.4: 1 and 0.5: 0 violate and pool to 1/2; 0.9: 1.
    curve = fit_isotonic([0.9, 0.1, 0.5, 0.4], [1, 0, 0, 1])
    assert curve == IsotonicCurve(scores=(0.1, 0.4, 0.9), values=(0.0, 0.5, 1.0))
    where = [-5, 0.1, 0.39, 0.4, 0.5, 0.89, 0.9, 7]
    assert [curve(s) for s in where] == [0, 0, 0, 0.5, 0.5, 0.5, 1, 1]
    assert fit_isotonic([1, 2], [1, 0], [3, 1]).values == (0.75,)
    assert fit_isotonic([2, 2, 1], [1, 0, 0]).values == (0.0, 0.5)


def test_a_calibrated_score_is_found_again():
    rng = random.Random(0)
    scores = [rng.random() for _ in range(20_000)]
    curve = fit_isotonic(scores, [float(rng.random() < s) for s in scores])
    assert all(abs(curve(s / 10) - s / 10) < 0.05 for s in range(1, 10))


def test_it_survives_json():
    rng = random.Random(1)
    curve = fit_isotonic([rng.random() for _ in range(50)], [rng.random() for _ in range(50)])
    assert len(curve.scores) > 2
    assert IsotonicCurve(**json.loads(json.dumps(curve.model_dump()))) == curve


@pytest.mark.parametrize(
    "call",
    [
        lambda: fit_isotonic([], []),
        lambda: fit_isotonic([1.0], [1, 0]),
        lambda: fit_isotonic([1.0], [1], [0.0]),
        lambda: IsotonicCurve(scores=(), values=()),
        lambda: IsotonicCurve(scores=(1, 2), values=(0.5,)),
        lambda: IsotonicCurve(scores=(2, 1), values=(0.1, 0.5)),
        lambda: IsotonicCurve(scores=(1, 2), values=(0.5, 0.1)),
    ],
)
def test_what_is_no_curve_is_refused(call):
    with pytest.raises(ConfigError, match="expected"):
        call()
