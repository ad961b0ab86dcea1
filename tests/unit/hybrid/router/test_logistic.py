"""From a confidence to the odds of agreement: against a grid, a closed form, a population."""

from __future__ import annotations

import math
import random

import pytest

from hybrid.errors import ConfigError
from hybrid.router.logistic import LogisticCurve, fit_logistic, log_odds


def likelihood(a, b, scores, agreed):
    total = 0.0
    for score, y in zip(scores, agreed, strict=True):
        p = 1 / (1 + math.exp(-(a + b * log_odds(score))))
        total += y * math.log(p) + (1 - y) * math.log(1 - p)
    return total


def test_a_curve_without_correction_is_the_confidence():
    for c in (0.01, 0.3, 0.5, 0.97):
        assert LogisticCurve()(c) == pytest.approx(c)
    assert math.isnan(LogisticCurve()(math.nan))
    assert LogisticCurve(slope=2)(0.0) < 1e-6
    assert LogisticCurve(slope=2)(1.0) > 1 - 1e-6


def test_one_score_gives_its_share():
    """With all data at c = 1/2 the intercept alone counts: the log-odds of the share."""
    curve = fit_logistic([0.5] * 10, [1] * 8 + [0] * 2)
    assert curve(0.5) == pytest.approx(0.8, abs=1e-6)


def test_nothing_on_a_grid_is_more_likely():
    draw = random.Random(3)
    scores = [draw.random() for _ in range(200)]
    agreed = [float(draw.random() < 0.2 + 0.6 * s) for s in scores]
    curve = fit_logistic(scores, agreed)
    best = likelihood(curve.intercept, curve.slope, scores, agreed)
    for i in range(-10, 11):
        for j in range(1, 21):
            assert likelihood(i / 5, j / 8, scores, agreed) <= best + 1e-9


def test_it_finds_the_population():
    truth, draw = LogisticCurve(intercept=-0.7, slope=1.6), random.Random(1)
    scores = [draw.random() for _ in range(20000)]
    agreed = [float(draw.random() < truth(s)) for s in scores]
    curve = fit_logistic(scores, agreed)
    assert curve.intercept == pytest.approx(truth.intercept, abs=0.08)
    assert curve.slope == pytest.approx(truth.slope, abs=0.08)


@pytest.mark.parametrize("agreed", [[1.0] * 6, [0.0] * 6, [1.0, 1, 1, 0, 0, 0]], ids=str)
def test_it_rises_whatever_the_data_are(agreed):
    scores = [0.2, 0.4, 0.6, 0.9, 0.99, 0.999]
    curve = fit_logistic(scores, agreed)
    values = [curve(s) for s in scores]
    assert all(math.isfinite(v) and 0 <= v <= 1 for v in values)
    assert values == sorted(values)
    assert LogisticCurve(**curve.model_dump()) == curve


@pytest.mark.parametrize(("scores", "agreed"), [([], []), ([0.5], []), ([], [1.0])])
def test_bad_data_are_refused(scores, agreed):
    with pytest.raises(ConfigError, match="expected as many, at least one"):
        fit_logistic(scores, agreed)
