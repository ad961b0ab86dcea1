"""From a confidence to the probability that a drafted token agrees with AR, by logistic regression.

Platt scaling, as in Guo et al., arXiv:1706.04599, section 4.2: two numbers per slot of a draft. The
curve rises strictly, so it can tell apart the very sure from the surest, which is where thresholds
lie; a step function fitted to the same data calls all of them certain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from hybrid.config import Config
from hybrid.errors import ConfigError

_EDGE = 1e-6  # confidences are kept this far from 0 and 1
_LEAST_SLOPE = 0.05  # the curve rises even where the data do not
_STEPS = 50


class LogisticCurve(Config):
    """1 / (1 + exp(-(intercept + slope log(c / (1 - c))))) at confidence c; 0 and 1 is c itself.

    Attributes:
        intercept: log-odds at c = 1/2.
        slope: positive.
    """

    intercept: float = 0.0
    slope: Annotated[float, Field(gt=0)] = 1.0

    def __call__(self, confidence: float) -> float:
        """Return the value at a confidence in [0, 1]; NaN gives NaN."""
        return _sigmoid(self.intercept + self.slope * log_odds(confidence))


def log_odds(confidence: float) -> float:
    """Return log(c / (1 - c)), finite also for 0 and 1."""
    if confidence != confidence:
        return confidence
    inside = min(max(confidence, _EDGE), 1 - _EDGE)
    return math.log(inside / (1 - inside))


def fit_logistic(scores: Sequence[float], agreed: Sequence[float]) -> LogisticCurve:
    """Return the curve of the largest likelihood, by Newton's method.

    Args:
        scores: confidences.
        agreed: whether the token agreed, 0 or 1, or its probability to. If all of them are equal
            there is no largest likelihood; add tokens of your own belief.

    Raises:
        ConfigError: no data, or different lengths.
    """
    if not len(scores) == len(agreed) > 0:
        raise ConfigError(
            f"got {len(scores)} scores and {len(agreed)} outcomes, expected as many, at least one."
        )
    xs = [log_odds(score) for score in scores]
    a, b = 0.0, 1.0
    for _ in range(_STEPS):
        probs = [_sigmoid(a + b * x) for x in xs]
        errors = [y - p for y, p in zip(agreed, probs, strict=True)]
        weights = [p * (1 - p) for p in probs]
        g0, g1 = sum(errors), sum(e * x for e, x in zip(errors, xs, strict=True))
        h00 = sum(weights) + _EDGE
        h01 = sum(w * x for w, x in zip(weights, xs, strict=True))
        h11 = sum(w * x * x for w, x in zip(weights, xs, strict=True)) + _EDGE
        det = h00 * h11 - h01 * h01
        da, db = (h11 * g0 - h01 * g1) / det, (h00 * g1 - h01 * g0) / det
        size = max(abs(da), abs(db), 1.0)  # no step is longer than 1, so that none overshoots
        a, b = a + da / size, max(b + db / size, _LEAST_SLOPE)
        if max(abs(da), abs(db)) < 1e-9:
            break
    return LogisticCurve(intercept=a, slope=b)


def _sigmoid(x: float) -> float:
    if x != x:
        return x
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
