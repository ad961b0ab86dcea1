"""How probably a token is accepted: counted by hand, and against drafts of known quality."""

from __future__ import annotations

import json
import math
import random

import pytest

from hybrid.errors import ConfigError
from hybrid.router.acceptance import CARRIED, COPIED, FRESH, AcceptanceModel, outcomes
from hybrid.types import RowStep


def step(confidences, fed, accepted, first_slot=1, disagreements=()):
    return RowStep(
        0,
        (5,) * (accepted + 1),
        (),
        num_proposed=len(confidences),
        num_drafted=fed,
        num_accepted=accepted,
        num_unverified=len(disagreements),
        disagreements=disagreements,
        confidences=tuple(confidences),
        first_slot=first_slot,
    )


@pytest.mark.parametrize(
    ("fed", "accepted", "disagreements", "expected"),
    [
        (0, 0, (), []),
        (3, 3, (), [1, 1, 1]),
        (3, 1, (), [1, 0]),
        (3, 0, (), [0]),
        (3, 2, (0.25, 1.0), [0.75, 0, 0]),
        (2, 2, (0.0, 0.5), [1, 0.5]),
    ],
    ids=["nothing", "all", "one", "none", "unverified, then rejected", "unverified only"],
)
def test_tokens_are_judged_up_to_the_first_rejection(fed, accepted, disagreements, expected):
    assert outcomes(step([0.5] * 4, fed, accepted, disagreements=disagreements)) == expected


def test_the_counts_of_a_cell_by_hand():
    model = AcceptanceModel(window=10**9)
    assert model.probability(1, 0.8) == pytest.approx(0.8 * 0.65)
    model.observe(step([0.8, 0.8, 0.8], 3, 1))  # slot 1 accepted, slot 2 rejected, slot 3 unjudged
    ratio = (0.5 * 0.65 + 1) / (0.5 + 0.8 + 0.8)  # accepted per confidence so far
    assert model.probability(1, 0.8) == pytest.approx((4 * 0.8 * ratio + 1) / (4 + 1))
    assert model.probability(2, 0.8) == pytest.approx((4 * 0.8 * ratio) / (4 + 1))
    assert model.probability(3, 0.8) == pytest.approx(0.8 * ratio), "nobody judged it"
    assert model.probability(1, 0.3) == pytest.approx(0.3 * ratio), "another bin"
    assert model.typical(FRESH, 1, 3) == pytest.approx(
        [(0.5 * 0.65 + 1) / 1.5, (0.5 * 0.65) / 1.5, 0.65]
    )


def test_unverified_tokens_count_by_what_the_target_says_of_them():
    model = AcceptanceModel(window=10**9)
    model.observe(step([0.9], 1, 1, disagreements=(0.25,)))
    assert model.typical(FRESH, 1, 1) == pytest.approx([(0.5 * 0.65 + 0.75) / 1.5])


def test_kinds_of_draft_are_told_apart():
    model = AcceptanceModel()
    for _ in range(40):
        model.observe(step([0.9, 0.9], 2, 2))
        model.observe(step([0.9, 0.9], 2, 1, first_slot=2))
        model.observe(step([math.nan], 1, 0, first_slot=0))
    fresh, carried = model.typical(FRESH, 1, 2), model.typical(CARRIED, 2, 2)
    assert min(fresh) > 0.95
    assert carried[0] > 0.95
    assert carried[1] < 0.1
    assert model.typical(COPIED, 1, 1)[0] < 0.05
    assert model.probability(0, math.nan) < 0.1
    assert model.probability(1, 0.9) > 0.8


def test_a_carried_draft_is_expected_to_be_a_little_worse_than_a_fresh_one():
    model = AcceptanceModel()
    for _ in range(50):
        model.observe(step([0.5], 1, 0))
    fresh, carried = model.typical(FRESH, 1, 1)[0], model.typical(CARRIED, 2, 1)[0]
    assert carried == pytest.approx(0.9 * fresh)


def test_a_token_that_is_never_fed_does_not_stay_promising():
    model = AcceptanceModel()
    for _ in range(30):
        model.observe(step([0.05, 0.9], 0, 0, first_slot=2))
    assert model.typical(CARRIED, 2, 1)[0] < 0.1
    assert model.probability(2, 0.05) == pytest.approx(0.05 * 0.65), "that is no evidence"


@pytest.mark.parametrize("boast", [1.0, 0.6, 1.3], ids=["calibrated", "boasting", "modest"])
def test_learned_probabilities_are_those_of_the_drafts(boast):
    rng, model = random.Random(1), AcceptanceModel(window=256)
    for _ in range(3000):
        sure = [rng.choice((0.2, 0.4, 0.6, 0.7)) for _ in range(3)]
        accepted = 0
        while accepted < 3 and rng.random() < sure[accepted] * boast:
            accepted += 1
        model.observe(step(sure, 3, accepted))
    for confidence in (0.2, 0.4, 0.7):
        for slot in (1, 2):
            assert model.probability(slot, confidence) == pytest.approx(
                confidence * boast, abs=0.12
            )


def test_old_counts_are_forgotten():
    model = AcceptanceModel(window=16)
    for _ in range(500):
        model.observe(step([0.9], 1, 1))
    for _ in range(60):
        model.observe(step([0.9], 1, 0))
    assert model.probability(1, 0.9) < 0.1
    assert model.typical(FRESH, 1, 1)[0] < 0.05


def test_json_gives_the_counts_back_but_caps_what_they_are_worth():
    model = AcceptanceModel(window=1000)
    for _ in range(500):
        model.observe(step([0.9], 1, 1))
    data = json.loads(json.dumps(model.to_dict()))
    started = AcceptanceModel.from_dict(data)
    assert started.probability(1, 0.9) > 0.9
    for _ in range(60):
        started.observe(step([0.9], 1, 0))
    assert started.probability(1, 0.9) < 0.4, "a few dozen tokens overrule the start"
    few = AcceptanceModel()
    few.observe(step([0.9], 1, 1))
    assert AcceptanceModel.from_dict(few.to_dict()).to_dict() == few.to_dict()


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"cells": [[1]], "kinds": [], "trust": [1, 1]},
        {"cells": [], "kinds": [], "trust": [0, 0]},
    ],
)
def test_what_is_no_acceptance_model_is_refused(data):
    with pytest.raises(ConfigError, match="acceptance: got no counts"):
        AcceptanceModel.from_dict(data)
