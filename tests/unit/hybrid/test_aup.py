"""AUP against numbers of its authors' own function, and by hand."""

from __future__ import annotations

import math

import pytest

from hybrid.errors import ConfigError
from hybrid.metrics import aup, total_tokens_per_forward
from hybrid.types import Stats

REFERENCE = 201.61407466339514  # their get_aup([1, 2, 4], [70, 69, 66], 80)


def test_numbers_of_the_reference() -> None:
    assert aup([1, 2, 4], [70, 69, 66], 80) == REFERENCE
    assert aup([4, 1, 2], [66, 70, 69], 80) == REFERENCE
    assert aup([1], [77.4], 77.4) == 77.4


def test_by_hand() -> None:
    weight = math.exp(-3 * (1 - 60 / 80))
    # 2 * 80 in front of the first point, then a trapezoid from 80 (weight 1) to 76, then to 80.
    low = 76 * math.exp(-3 * (1 - 76 / 80))
    expected = 160 + (80 + low) / 2 + 3 * (low + 80) / 2
    assert aup([2, 3, 6], [80, 76, 80], 80) == pytest.approx(expected, rel=1e-12)
    # In front of the first point nothing is weighted, behind it everything.
    assert aup([1, 2], [60, 60], 80) == pytest.approx(60 + 60 * weight, rel=1e-12)


def test_a_point_that_loses_too_much_is_left_out() -> None:
    assert aup([1, 2, 3], [70, 60, 69], 70) == aup([1, 3], [70, 69], 70)
    assert aup([1, 2, 3], [70, 65, 69], 70) != aup([1, 3], [70, 69], 70)  # exactly 5 stay


def test_the_reference_asserts_where_we_refuse() -> None:
    with pytest.raises(ConfigError, match=r"TPF 9\) has 60 %, which is 13 points below"):
        aup([1, 3, 6, 9], [73, 72, 70, 60], 77)
    assert aup([1, 3, 6, 9], [73, 72, 70, 60], 77, max_loss=13) > 73


def test_nothing_right_is_no_division_by_zero() -> None:
    assert aup([1, 2], [0, 0], 0) == 0


@pytest.mark.parametrize(
    ("tpf", "accuracy", "best", "reason"),
    [
        ([], [], 80, "at least 1"),
        ([1], [70, 60], 80, "got 1 TPF and 2"),
        ([0, 1], [70, 70], 80, "TPF 0, expected more than 0"),
        ([1], [101], 80, "accuracy of 101, expected percent"),
        ([1], [70], -1, "accuracy of -1, expected percent"),
    ],
)
def test_refusals(tpf, accuracy, best, reason) -> None:
    with pytest.raises(ConfigError, match=reason):
        aup(tpf, accuracy, best)


def test_total_tpf_is_sums_over_sums() -> None:
    parts = [Stats(num_new_tokens=10, num_forwards=4), Stats(num_new_tokens=2, num_forwards=2)]
    assert total_tokens_per_forward(parts) == 2.0
    assert total_tokens_per_forward([]) == 0.0
