"""A profile: what it trusts, what it refuses, and the file."""

from __future__ import annotations

import json
import math

import pytest

from hybrid.errors import CheckpointError, ConfigError
from hybrid.router.acceptance import AcceptanceModel
from hybrid.router.cost import CostModel
from hybrid.router.logistic import LogisticCurve
from hybrid.router.profile import Profile, Threshold

EVIDENCE = {"num_prompts": 200, "num_tokens": 3000, "disagreements": 12.0, "p_value": 0.001}


def profile(**fields):
    given = {
        "model": "tiny",
        "adapter": "draft",
        "domain": "chat",
        "risk": 0.02,
        "thresholds": (
            Threshold(threshold=0.99, **EVIDENCE),
            Threshold(threshold=0.9, **EVIDENCE),
        ),
        "calibration": {2: LogisticCurve(intercept=2.2, slope=2.0)},
        "costs": CostModel.guess().to_dict(),
        "acceptance": AcceptanceModel().to_dict(),
    }
    return Profile(**(given | fields))


@pytest.mark.parametrize(
    ("first_slot", "confidences", "level", "expected"),
    [
        (1, (0.995, 0.1), 0, 1),
        (1, (0.95, 0.6, 0.95), 1, 3),  # slot 2 has a curve: 0.6 is worth 0.95
        (1, (0.95, 0.4, 0.95), 1, 1),  # and 0.4 is worth 0.8
        (2, (0.6, 0.6), 1, 1),  # slot 3 has none
        (1, (0.8, 0.99), 1, 0),
        (1, (1.0, 1.0), None, 0),
        (0, (1.0, 1.0), 1, 0),
        (2, (math.nan, 1.0), 1, 0),
        (1, (), 1, 0),
    ],
    ids=["strict", "lax", "curve", "carried", "leading", "none", "copied", "nan", "empty"],
)
def test_leading_tokens_are_trusted_by_their_calibrated_score(
    first_slot, confidences, level, expected
):
    assert profile().num_trusted(first_slot, confidences, level) == expected


def test_the_file_gives_the_profile_back_and_holds_no_date(tmp_path):
    path = tmp_path / "folder" / "profile.json"
    profile().save(path)
    assert Profile.load(path) == profile()
    first = path.read_bytes()
    profile().save(path)
    assert path.read_bytes() == first
    assert [p.name for p in path.parent.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": 2}, "format 2, expected 1. Calibrate again"),
        ({"thresholds": []}, None),
        ({"thresholds": "x"}, "thresholds"),
        ({"risk": 0}, "risk"),
        ({"speed": 1}, "no parameter 'speed'"),
        ({"costs": {"target": []}}, "cost: got no cost model"),
        ({"acceptance": {"cells": 1}}, "acceptance: got no counts"),
        ({"calibration": {"2": {"slope": -1}}}, "slope"),
    ],
)
def test_files_that_are_no_profile_of_this_version_are_refused(tmp_path, fields, message):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile().model_dump(mode="json") | fields))
    if message is None:
        assert Profile.load(path).thresholds == ()
        return
    with pytest.raises(CheckpointError, match="not a profile that can be used") as raised:
        Profile.load(path)
    assert message in str(raised.value)


@pytest.mark.parametrize("text", ["", "[1]", "{", "\x00"])
def test_garbage_is_refused(tmp_path, text):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match="not a profile"):
        Profile.load(path)
    with pytest.raises(CheckpointError, match="not a profile"):
        Profile.load(tmp_path / "missing.json")


def test_thresholds_must_go_from_strict_to_lax():
    lax_first = tuple(reversed(profile().thresholds))
    with pytest.raises(ConfigError, match="strict to lax"):
        profile(thresholds=lax_first)


def test_a_profile_of_something_else_is_refused():
    profile().check("tiny", "draft", 0.0, 0.02)
    profile().check("tiny", "draft", 0.0, 0.1)
    for request, message in [
        (("other", "draft", 0.0, 0.02), "got model 'other', expected 'tiny'"),
        (("tiny", None, 0.0, 0.02), "got adapter None, expected 'draft'"),
        (("tiny", "draft", 0.7, 0.02), "got temperature 0.7, expected 0.0"),
        (("tiny", "draft", 0.0, 0.01), "got risk 0.01, expected 0.02 or more"),
    ]:
        with pytest.raises(ConfigError) as raised:
            profile().check(*request)
        assert message in str(raised.value)
