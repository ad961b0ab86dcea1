"""From a score to the probability that a drafted token agrees with AR: a monotone step function."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby, pairwise

from pydantic import model_validator

from hybrid.config import Config
from hybrid.errors import ConfigError


class IsotonicCurve(Config):
    """A step function that never falls. Plain numbers: `model_dump` and `**` take it to JSON.

    Attributes:
        scores: where each step begins, rising.
        values: its height, rising.
    """

    scores: tuple[float, ...]
    values: tuple[float, ...]

    @model_validator(mode="after")
    def _rises(self) -> IsotonicCurve:
        if not len(self.scores) == len(self.values) > 0:
            raise ValueError(
                f"got {len(self.scores)} scores and {len(self.values)} values, "
                "expected as many, and at least one."
            )
        for name, row in (("scores", self.scores), ("values", self.values)):
            if any(not a < b for a, b in pairwise(row)):
                raise ValueError(f"{name}: got {row}, expected rising numbers.")
        return self

    def __call__(self, score: float) -> float:
        """Return the value at `score`; below all scores that were seen, the lowest value."""
        return self.values[max(bisect_right(self.scores, score) - 1, 0)]


def fit_isotonic(
    scores: Sequence[float], agreed: Sequence[float], weights: Sequence[float] | None = None
) -> IsotonicCurve:
    """Return the rising step function that is closest to the data in weighted least squares.

    Pool adjacent violators: go through the data in the order of their scores, and while a block's
    mean does not exceed its predecessor's, merge the two.

    Args:
        scores: higher should mean surer; equal scores get equal values.
        agreed: whether the token agreed, 0 or 1, or its probability to.
        weights: positive; 1 each if None.

    Raises:
        ConfigError: no data, different lengths, or a weight that is not positive.
    """
    weights = [1.0] * len(scores) if weights is None else weights
    if not len(scores) == len(agreed) == len(weights) > 0:
        raise ConfigError(
            f"got {len(scores)} scores, {len(agreed)} outcomes and {len(weights)} weights, "
            "expected as many of each, and at least one."
        )
    if not all(weight > 0 for weight in weights):
        raise ConfigError("weights: expected positive numbers; leave out what has no weight.")
    blocks: list[tuple[float, float, float]] = []  # score at which it begins, total, weight
    data = sorted(zip(scores, agreed, weights, strict=True), key=lambda item: item[0])
    for score, group in groupby(data, key=lambda item: item[0]):
        same = list(group)
        total, weight = sum(a * w for _, a, w in same), sum(w for *_, w in same)
        while blocks and total / weight <= blocks[-1][1] / blocks[-1][2]:
            score, more, much = blocks.pop()
            total, weight = total + more, weight + much
        blocks.append((score, total, weight))
    return IsotonicCurve(
        scores=tuple(score for score, *_ in blocks),
        values=tuple(total / weight for _, total, weight in blocks),
    )
