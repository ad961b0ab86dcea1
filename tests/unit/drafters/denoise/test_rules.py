"""Unmask rules on crafted numbers: equality with the threshold, ties, quotas, several blocks."""

from types import SimpleNamespace

import pytest
import torch

from hybrid.decode.canvas import Block
from hybrid.drafters.denoise import rules
from hybrid.drafters.denoise.rules import EntropyBounded, Factor, Unmask


def slots(confidence, *, start=10, masked=None, **numbers):
    count = len(confidence)
    return SimpleNamespace(
        positions=torch.arange(start, start + count),
        masked=torch.ones(count, dtype=torch.bool) if masked is None else torch.tensor(masked),
        confidence=torch.tensor(confidence),
        **{name: torch.tensor(values) for name, values in numbers.items()},
    )


def chosen(rule, given, *blocks):
    blocks = blocks or (Block(10, 10 + len(given.positions), 1),)
    return sorted(given.positions[rule.choose(given, blocks)].tolist())


@pytest.mark.parametrize(("is_strict", "expected"), [(False, [10, 12]), (True, [12])])
def test_a_score_equal_to_the_threshold(is_strict, expected):
    given = slots([0.5, 0.25, 0.75])
    assert chosen(Unmask(threshold=0.5, is_strict=is_strict), given) == expected


def test_the_best_one_where_nothing_passes():
    assert chosen(Unmask(threshold=0.9), slots([0.5, 0.25, 0.75])) == [12]
    assert chosen(Unmask(threshold=0.9), slots([0.5, 0.75, 0.75])) == [11]  # the earlier


def test_the_quota_where_fewer_pass():
    given = slots([0.5, 0.95, 0.75, 0.1])
    assert chosen(Unmask(threshold=0.9), given, Block(10, 14, 2)) == [11, 12]
    assert chosen(Unmask(threshold=0.4), given, Block(10, 14, 2)) == [10, 11, 12]
    assert chosen(Unmask(threshold=0.9), given, Block(10, 14, 9)) == [10, 11, 12, 13]
    assert chosen(Unmask(threshold=0.99), given, Block(10, 14, 0)) == []
    assert chosen(Unmask(), given, Block(10, 14, 3)) == [10, 11, 12]


def test_each_block_by_itself_and_masked_slots_only():
    given = slots([0.5, 0.95, 0.75, 0.1], masked=[True, False, True, True])
    rule = Unmask(threshold=0.7)
    assert chosen(rule, given, Block(10, 12), Block(12, 14)) == [10, 12]
    assert chosen(rule, given, Block(12, 14, 2)) == [12, 13]


def test_scores():
    given = slots([0.5, 0.9], margin=[0.3, 0.1], entropy=[0.2, 0.4], random=[0.1, 0.2])
    assert chosen(Unmask(rules.margin), given) == [10]
    assert chosen(Unmask(rules.certainty), given) == [10]
    assert chosen(Unmask(rules.arbitrary), given) == [11]
    assert chosen(Unmask(rules.leftmost), given, Block(10, 12, 1)) == [10]


def test_an_entropy_threshold_is_one_on_certainty():
    given = slots([0.1] * 3, entropy=[0.5, 0.75, 0.4])
    rule = Unmask(rules.certainty, -0.5)
    assert chosen(rule, given) == [10, 12]
    assert chosen(Unmask(rules.certainty, -0.5, is_strict=True), given) == [12]


@pytest.mark.parametrize(
    ("confidence", "expected"),
    [
        ([0.9, 0.8, 0.1], [10, 11]),  # n = 2: 0.8 >= 1 - 1 / 3
        ([0.1, 0.2, 0.3], [12]),  # none: the best
        ([0.5, 0.1, 0.1], [10]),  # n = 1: 0.5 >= 1 - 1 / 2
        ([0.8, 0.8, 0.8], [10, 11, 12]),  # n = 3: 0.8 >= 1 - 1 / 4
    ],
)
def test_factor(confidence, expected):
    assert chosen(Factor(1.0), slots(confidence)) == expected


@pytest.mark.parametrize(
    ("gamma", "expected"), [(0.0, [11]), (0.1, [10, 11]), (0.25, [10, 11]), (0.35, [10, 11, 12])]
)
def test_entropy_bounded(gamma, expected):
    # By rising entropy 0.1, 0.2, 0.5: what precedes adds up to 0, 0.1, 0.3.
    given = slots([0.5] * 3, entropy=[0.2, 0.1, 0.5])
    assert chosen(EntropyBounded(gamma), given) == expected


def test_drawn_slots_follow_the_softmax_of_their_scores():
    odds, counts = torch.tensor([1.0, 2.0, 4.0]).log(), torch.zeros(3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3000):
        noise = torch.rand(3, generator=generator, dtype=torch.float64)
        given = slots((odds * 0.5).tolist(), random=noise.tolist())
        rule = Unmask(rules.drawn(rules.confidence, 0.5))
        counts[chosen(rule, given)[0] - 10] += 1
    expected = 3000 * torch.tensor([1.0, 2.0, 4.0]) / 7
    assert ((counts - expected) ** 2 / expected).sum() < 13.8  # p = 0.001, 2 degrees of freedom
