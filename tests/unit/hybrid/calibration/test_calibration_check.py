"""What a profile is worth on other prompts, as numbers, as text and as a picture."""

from __future__ import annotations

import json

import pytest
from fakes import random_prompts
from profiles import NEVER, confident_decoder, made_up, threshold

from hybrid import Strategy
from hybrid.calibration.check import check_profile
from hybrid.calibration.plot import plot_profile
from hybrid.calibration.tables import check_table, profile_table
from hybrid.errors import CheckpointError, ConfigError
from hybrid.router.logistic import LogisticCurve

PROMPTS = random_prompts(*[5] * 20, vocab_size=16)


@pytest.fixture
def path(tmp_path):
    made_up(confident_decoder(), 0.9, 0.4, risk=0.05, domain="noise").save(tmp_path / "p.json")
    return tmp_path / "p.json"


def test_each_strategy_decodes_each_prompt(path):
    told = []
    document = check_profile(
        confident_decoder(),
        PROMPTS,
        path,
        max_new_tokens=20,
        risks=(0.9,),
        progress=lambda *what: told.append(what),
    )
    json.dumps(document)
    assert told == [("prompts", n, 20) for n in range(1, 21)]
    assert document["profile"] == {"domain": "noise", "risk": 0.05, "delta": 0.05}
    assert (document["num_prompts"], document["max_new_tokens"]) == (20, 20)
    rows = {row["strategy"]: row for row in document["rows"]}
    assert list(rows) == [
        "ar", "speculative", "hybrid risk=0", "hybrid risk=0.05", "hybrid risk=0.9"
    ]  # fmt: skip
    for name in ("ar", "speculative", "hybrid risk=0"):
        assert rows[name]["equal_to_ar"] == 20
        assert rows[name]["num_unverified"] == rows[name]["disagreement"] == 0
    assert rows["ar"]["tokens_per_forward"] == 1
    assert rows["ar"]["forwards_by_mode"] == {"ar": 19 * 20}
    assert rows["speculative"]["against_speculative"] == 1
    some, all_ = rows["hybrid risk=0.05"], rows["hybrid risk=0.9"]
    assert 0 < some["num_unverified"] < all_["num_unverified"]
    assert 0 < some["disagreement"] < 0.05 + 6 / some["num_unverified"] < all_["disagreement"]
    assert all_["equal_to_ar"] < some["equal_to_ar"] < 20
    assert all_["tokens_per_forward"] > rows["ar"]["tokens_per_forward"]


def test_its_numbers_are_those_of_the_answers(path):
    row = check_profile(confident_decoder(), PROMPTS, path, max_new_tokens=20)["rows"][-1]
    model = confident_decoder()
    strategy = Strategy.preset("hybrid", risk=0.05, profile=path)
    results = [model.generate(p, strategy=strategy, max_new_tokens=20) for p in PROMPTS]
    stats = [r.stats for r in results]
    assert row["num_unverified"] == sum(s.num_unverified for s in stats)
    assert row["num_unverified_disagreeing"] == sum(s.num_unverified_disagreeing for s in stats)
    forwards = sum(s.num_draft_forwards + s.num_verify_forwards for s in stats)
    assert row["tokens_per_forward"] == pytest.approx(19 * 20 / forwards)
    assert sum(row["forwards_by_mode"].values()) == forwards
    expected = [model.generate(p, strategy="ar", max_new_tokens=20) for p in PROMPTS]
    same = [r.token_ids == e.token_ids for r, e in zip(results, expected, strict=True)]
    assert row["equal_to_ar"] == sum(same)


def test_a_profile_that_does_not_fit_is_refused(path, tmp_path):
    with pytest.raises(ConfigError, match="got risk 0.01, expected 0.05 or more"):
        check_profile(confident_decoder(), PROMPTS, path, risks=(0.01,))
    made_up(confident_decoder(), NEVER, model="other").save(path)
    with pytest.raises(ConfigError, match="expected 'other'"):
        check_profile(confident_decoder(), PROMPTS, path)
    with pytest.raises(CheckpointError, match="not a profile"):
        check_profile(confident_decoder(), PROMPTS, tmp_path / "missing.json")


def test_tables_are_aligned_and_fit_a_terminal(path):
    profile = made_up(confident_decoder(), 0.999, 0.8)
    tested = threshold(0.93).replace(num_tokens=12345, disagreements=123.0, p_value=0.01)
    text = profile_table(profile.replace(thresholds=(tested,)))
    assert "risk 0.1 with confidence 95%, domain test, temperature 0" in text
    header, row = text.splitlines()[-2:]
    assert (len(header), header.split()[0]) == (len(row), "threshold")
    assert row.split() == ["0.930", "12345", "0.0100", "1.0000", "0.0100", "0.00"]
    document = check_profile(confident_decoder(), PROMPTS[:2], path, max_new_tokens=6)
    lines = check_table(document).splitlines()
    assert lines[0] == "2 prompts x 6 tokens, profile: noise, risk 0.05"
    assert {len(line) for line in lines[2:]} == {len(lines[2])}
    assert max(map(len, lines + text.splitlines())) <= 88
    assert [line.split("  ")[0] for line in lines[3:]] == [
        "ar", "speculative", "hybrid risk=0", "hybrid risk=0.05"
    ]  # fmt: skip


def test_the_evidence_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    curves = {1: LogisticCurve(), 2: LogisticCurve(intercept=-1.0, slope=2.0)}
    profile = made_up(confident_decoder(), 0.99, 0.9, calibration=curves)
    assert plot_profile(profile, tmp_path / "a" / "p.png") == tmp_path / "a" / "p.png"
    assert (tmp_path / "a" / "p.png").read_bytes().startswith(b"\x89PNG")
