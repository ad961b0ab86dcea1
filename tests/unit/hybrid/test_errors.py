"""The error tree and the did-you-mean."""

from __future__ import annotations

import pytest

import hybrid
from hybrid import errors
from hybrid.errors import HybridError, did_you_mean

NAMES = [
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "KernelUnavailableError",
    "ProposalError",
]


@pytest.mark.parametrize("name", NAMES)
def test_every_error_is_a_hybrid_error_and_public(name):
    kind = getattr(errors, name)
    assert issubclass(kind, HybridError)
    assert getattr(hybrid, name) is kind


def test_a_config_error_is_a_value_error():
    assert issubclass(errors.ConfigError, ValueError)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gredy", " Did you mean 'greedy'?"),
        ("zzz", " Choose from: block, greedy."),
        ("", " Choose from: block, greedy."),
    ],
)
def test_did_you_mean(name, hint):
    assert did_you_mean(name, {"greedy", "block"}) == hint


def test_did_you_mean_without_choices_says_nothing():
    assert did_you_mean("x", []) == ""
