"""The stream on the host, against the kernel's plain PyTorch and the published known answers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.errors import ConfigError
from hybrid.kernels.philox import philox
from hybrid.streams import RandomStream, uniform_at

SEEDS = st.one_of(st.sampled_from([0, 1, 2**32 - 1, 2**32, 2**63 - 1]), st.integers(0, 2**63 - 1))
PLACES = st.one_of(st.sampled_from([0, 2**32 - 2, 2**40]), st.integers(0, 2**62))


@given(seed=SEEDS, first=PLACES)
@settings(max_examples=60, deadline=None)
def test_the_bits_are_those_of_the_kernel(seed: int, first: int) -> None:
    theirs = philox(torch.tensor([seed]), torch.tensor([first]), 5)[0].tolist()
    stream = RandomStream(seed, first)
    assert [stream.uniform() for _ in range(5)] == theirs
    assert stream.offset == first + 5


def test_known_answer() -> None:
    """Random123's kat_vectors: philox4x32-10 of counter 0 and key 0 begins 6627e8d5 e169c58d."""
    assert uniform_at(0, 0) == ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53


def test_taking_reserves_and_draws_nothing() -> None:
    stream, twin = RandomStream(7), RandomStream(7)
    assert (stream.take(3), stream.take(0), stream.offset) == (0, 3, 3)
    drawn = [twin.uniform() for _ in range(4)]
    assert stream.uniform() == drawn[3] == uniform_at(7, 3)


def test_numbers_are_uniform_and_seeds_differ() -> None:
    stream = RandomStream(5)
    drawn = [stream.uniform() for _ in range(4000)]
    assert all(0 <= u < 1 and (u * 2**53).is_integer() for u in drawn)
    # 6.5 standard errors of the mean, and of each tenth: 1e-9 that it fails by chance.
    assert abs(sum(drawn) / 4000 - 0.5) < 0.03
    tenths = [sum(int(10 * u) == i for u in drawn) for i in range(10)]
    assert all(abs(count - 400) < 124 for count in tenths)
    assert len({uniform_at(seed, 0) for seed in range(100)}) == 100


@pytest.mark.parametrize(("seed", "offset"), [(-1, 0), (2**63, 0), (0, -1), (0, 2**63)])
def test_what_int64_cannot_hold_is_refused(seed: int, offset: int) -> None:
    with pytest.raises(ConfigError, match="expected 0 to"):
        RandomStream(seed, offset)
