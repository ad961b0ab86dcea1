"""From prompts to a profile: each part by hand, then the whole on a model sure of itself."""

from __future__ import annotations

import math
from contextlib import suppress
from random import Random

import pytest
from fakes import RandomTarget, random_prompts
from profiles import ConfidentDrafter, confident_decoder, made_up

from hybrid import HybridDecoder, Strategy
from hybrid.calibration import calibrate, evidence
from hybrid.calibration.calibrate import (
    GRID,
    CalibrationConfig,
    calibrate_profile,
    counts,
    fit_curves,
    speed,
    usual_count,
    worth_testing,
)
from hybrid.calibration.evidence import Judged, PromptEvidence
from hybrid.errors import ConfigError
from hybrid.router.acceptance import AcceptanceModel
from hybrid.router.bounds import betting_p_value
from hybrid.router.profile import Profile

PROMPTS = random_prompts(*[5] * 150, vocab_size=16)
CONFIG = CalibrationConfig(risk=0.1, max_new_tokens=12, fit_share=0.2)


def tokens(slot, confidence, right, wrong, index=0):
    """Judged tokens of a slot; they begin a draft unless `index` says otherwise."""
    return [
        Judged(slot - index, index, confidence, float(i >= right)) for i in range(right + wrong)
    ]


def judged(*groups):
    return PromptEvidence(10, 10, 0, 0.0, tuple(token for group in groups for token in group))


# Parts


def test_a_curve_tells_the_probability_that_the_target_agrees():
    some = [*tokens(1, 0.6, 300, 300), *tokens(1, 0.9, 540, 60)]
    some += [*tokens(2, 0.6, 60, 540, 1), *tokens(2, 0.9, 300, 300, 1)]
    curves = fit_curves(some)
    assert sorted(curves) == [1, 2]
    for slot, confidence, expected in [(1, 0.6, 0.5), (1, 0.9, 0.9), (2, 0.6, 0.1), (2, 0.9, 0.5)]:
        assert curves[slot](confidence) == pytest.approx(expected, abs=0.03)


def test_a_few_tokens_that_agree_are_not_taken_for_certainty():
    curve = fit_curves(tokens(1, 0.7, 60, 0))[1]
    assert 0.7 < curve(0.7) < 0.99
    assert curve(0.2) < curve(0.7) < curve(0.99)


def test_slots_with_few_tokens_share_a_curve_with_those_behind():
    one, two, four = tokens(1, 0.9, 60, 0), tokens(2, 0.9, 0, 49, 1), tokens(4, 0.9, 0, 9, 3)
    curves = fit_curves([*one, *two, *four])
    assert sorted(curves) == [1, 2, 3, 4]
    behind = [*two, *four]
    assert curves[1] == fit_curves(one)[1]
    assert curves[2] == fit_curves([Judged(2, 0, t.confidence, t.disagreement) for t in behind])[2]
    assert curves[3] == curves[4] == fit_curves(four)[4]
    alone = fit_curves([*tokens(1, 0.9, 0, 50), *four])
    assert alone[1] == fit_curves(tokens(1, 0.9, 0, 50))[1], "50 tokens are enough"


def test_copied_tokens_have_no_curve():
    copied = [Judged(0, i, math.nan, 0.0) for i in range(100)]
    assert fit_curves([*copied, *tokens(2, 0.9, 60, 0)]) == fit_curves(tokens(2, 0.9, 60, 0))
    with pytest.raises(ConfigError, match="does not say how sure"):
        fit_curves(copied)


def test_it_is_worth_testing_what_disagrees_a_quarter_as_often_as_it_may():
    """0.999 always agrees, 0.9 in 88 of 100 cases, so it scores about 0.88."""
    half = judged(tokens(1, 0.999, 500, 0), tokens(1, 0.9, 440, 60))
    # Both together disagree in 6 of 100 cases. That is too often for 0.2, and fine for 0.26.
    assert worth_testing([half, half], 0.2) == list(GRID[GRID.index(0.9) :])
    assert worth_testing([half, half], 0.26) == [GRID[-1]]


def test_curves_do_not_judge_the_prompts_that_they_were_fitted_to():
    good, bad = judged(tokens(1, 0.9, 500, 0)), judged(tokens(1, 0.9, 0, 500))
    # The curve of the good half trusts the bad one, that of the bad half trusts nothing.
    assert worth_testing([good, bad], 0.1) == list(GRID)
    assert worth_testing([good, good], 0.1) == [GRID[-1]]


def test_without_anything_worth_it_the_strictest_comes_first():
    assert worth_testing([judged(tokens(1, 0.9, 0, 90))] * 4, 0.5) == list(GRID)


def test_the_usual_count_is_the_median_of_tokens_that_reach_the_threshold():
    profile = made_up(confident_decoder())  # without curves: a confidence is its own score
    copied = [Judged(0, 0, math.nan, 0.0)] * 30
    some = [
        judged(tokens(1, 0.95, number, 0), tokens(1, 0.5, 20, 0), copied) for number in (0, 2, 4, 9)
    ]
    assert usual_count(some, profile, 0.9) == 3.0
    assert usual_count(some, profile, 0.4) == 23.0
    assert usual_count(some, profile, 0.99) == 1.0, "at least 1"


def test_a_tested_threshold_comes_with_its_evidence():
    seen = [PromptEvidence(20, 8, 10, 0.0, ())] * 60 + [PromptEvidence(10, 7, 4, 1.5, ())] * 2
    config = CalibrationConfig(risk=0.1, delta=0.05)
    found = calibrate.tested(0.9, seen, config, 10.0)
    assert (found.threshold, found.num_prompts) == (0.9, 62)
    assert (found.num_tokens, found.disagreements) == (608, 3.0)
    assert found.tokens_per_forward == pytest.approx(1220 / 494)
    disagreements, numbers = [0.0] * 60 + [1.5] * 2, [10] * 60 + [4] * 2

    def p_value(share):
        return betting_p_value(disagreements, numbers, share, most=10.0)

    assert found.p_value == p_value(0.1) < 0.05
    assert p_value(found.upper_bound) <= 0.05 < p_value(found.upper_bound - 1e-6)
    assert 3 / 608 < found.upper_bound < 0.1


def test_clean_prompts_have_the_p_value_of_a_bettor_by_hand():
    """A bettor with half of the capital stakes all: 1 + risk / (1 - risk) per clean prompt."""
    seen = [PromptEvidence(5, 5, 3, 0.0, ())] * 40
    found = calibrate.tested(0.9, seen, CalibrationConfig(risk=0.1), 3.0)
    capital = sum(
        share * (1 + stake * 0.1 / 0.9) ** 40
        for stake, share in zip(
            [2.0**-k for k in range(8)],
            [*(2.0 ** -(k + 1) for k in range(7)), 2.0**-7],
            strict=True,
        )
    )
    assert found.p_value == pytest.approx(1 / capital)
    assert calibrate.tested(0.9, seen, CalibrationConfig(risk=0.1), 6.0).p_value > found.p_value


def test_nothing_unverified_shows_nothing():
    found = calibrate.tested(0.9, [PromptEvidence(5, 5, 0, 0.0, ())] * 99, CONFIG, 1.0)
    assert (found.p_value, found.upper_bound) == (1.0, 1.0)
    assert speed([]) == 0.0


def test_counts_are_those_of_the_router():
    some = [judged(tokens(1, 0.9, 1, 1), tokens(2, 0.9, 1, 0, 1))] * 40
    model = AcceptanceModel.from_dict(counts(some))
    assert model.probability(1, 0.9) == pytest.approx(0.5, abs=0.06)
    assert model.probability(2, 0.9) > 0.9
    assert model.typical("fresh", 1, 2) == pytest.approx([0.5, 1.0], abs=0.06)


# The whole


def calibrated(folder, decoder=None, prompts=PROMPTS, config=CONFIG, **how):
    decoder = confident_decoder() if decoder is None else decoder
    profile = calibrate_profile(decoder, prompts, config, folder / "profile.json", **how)
    assert Profile.load(folder / "profile.json") == profile
    return profile


@pytest.mark.parametrize("cost", ["forwards", "measured"])
def test_a_profile_of_a_model_that_is_as_sure_as_it_says(tmp_path, cost):
    config = CONFIG.replace(cost=cost)
    profile = calibrated(tmp_path, config=config)
    assert (profile.model, profile.adapter, profile.risk) == ("model", None, 0.1)
    assert profile.router["cost"] == cost
    assert profile.costs["target"]
    assert profile.acceptance["cells"]
    assert profile.lossless_tokens_per_forward > 1
    for threshold in profile.thresholds:
        assert threshold.num_prompts == 120
        assert threshold.num_tokens > 300
        assert threshold.disagreements / threshold.num_tokens < threshold.upper_bound <= 0.1
        assert threshold.p_value <= 0.05
    # Used as it was calibrated it does what the evidence says.
    model = confident_decoder()
    strategy = Strategy.preset("hybrid", risk=0.1, profile=profile)
    fresh = random_prompts(*[5] * 60, vocab_size=16, seed=9)
    stats = [model.generate(p, strategy=strategy, max_new_tokens=12).stats for p in fresh]
    unverified = sum(s.num_unverified for s in stats)
    assert unverified > 100
    assert sum(s.num_unverified_disagreeing for s in stats) <= 0.1 * unverified


def test_thresholds_go_on_until_one_fails(tmp_path):
    """Tokens of 0.97 agree in 97 of 100 cases, those of 0.85 in 85: one of the two is too many."""
    target = RandomTarget(16)
    drafter = ConfidentDrafter(target, confidences=(0.97, 0.85))
    config = CONFIG.replace(risk=0.09, max_new_tokens=16, num_thresholds=99)
    prompts = random_prompts(*[5] * 250, vocab_size=16)
    model, stages = HybridDecoder(target, drafter=drafter), []
    profile = calibrated(
        tmp_path, model, prompts, config, progress=lambda *what: stages.append(what)
    )
    tried = list(dict.fromkeys(stage for stage, *_ in stages))
    accepted = [f"threshold {t.threshold}" for t in profile.thresholds]
    assert tried == [
        "fit",
        *accepted,
        f"threshold {GRID[GRID.index(profile.thresholds[-1].threshold) + 1]}",
    ]
    assert len(accepted) > 1
    assert stages[0] == ("fit", 1, 50)
    assert stages[-1] == (tried[-1], 200, 200)


def test_an_interrupted_calibration_goes_on_where_it_stopped(tmp_path, monkeypatch):
    config = CONFIG.replace(cost="measured")  # costs are measured anew in every call
    (tmp_path / "whole").mkdir()
    calibrated(tmp_path / "whole", config=config)
    decoded, watch = [], evidence.watch

    def interrupted(*args):
        decoded.append(args)
        if len(decoded) % 70 == 0:
            raise KeyboardInterrupt
        return watch(*args)

    monkeypatch.setattr(evidence, "watch", interrupted)
    path = tmp_path / "profile.json.evidence.jsonl"
    # Conditions and costs of the first call, those of the whole one: only the clock differs.
    lines = (tmp_path / "whole" / path.name).read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]))
    num_interruptions = 0
    while not (tmp_path / "profile.json").exists():
        try:
            calibrated(tmp_path, config=config)
        except KeyboardInterrupt:
            num_interruptions += 1
            with path.open("a") as file:
                file.write('{"run": "fit", "ind')
    assert num_interruptions > 1
    assert len(decoded) - num_interruptions == len(lines) - 2, "a prompt was decoded twice"
    assert (tmp_path / "profile.json").read_bytes() == (
        tmp_path / "whole" / "profile.json"
    ).read_bytes()
    assert path.read_text().splitlines()[1:] == [line.rstrip() for line in lines[1:]]


def test_the_same_evidence_gives_the_same_file_without_decoding(tmp_path, monkeypatch):
    calibrated(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(evidence, "watch", None)
    calibrated(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_evidence_of_another_calibration_is_refused(tmp_path):
    calibrated(tmp_path)
    target = RandomTarget(16)
    others = [
        {"prompts": PROMPTS[1:]},
        {"config": CONFIG.replace(risk=0.2)},
        {"config": CONFIG.replace(delta=0.1)},
        {"config": CONFIG.replace(temperature=0.5)},
        {"config": CONFIG.replace(max_new_tokens=13)},
        {"config": CONFIG.replace(cost="measured")},
        {"config": CONFIG.replace(block_size=3)},
        {"decoder": HybridDecoder(target, drafter=ConfidentDrafter(target), num_draft_tokens=2)},
        {"decoder": HybridDecoder(target, drafter=ConfidentDrafter(target), model_name="other")},
        {"decoder": HybridDecoder(target, drafter="ngram")},
    ]
    for how in others:
        with pytest.raises(ConfigError, match="evidence of another calibration"):
            calibrated(tmp_path, **how)


@pytest.mark.parametrize("number", [0, 1, 2, 5])
def test_too_few_prompts(tmp_path, number):
    with pytest.raises(ConfigError, match=f"prompts: got {number}, expected hundreds"):
        calibrated(tmp_path, prompts=PROMPTS[:number])
    assert list(tmp_path.iterdir()) == []


def test_without_a_threshold_that_keeps_the_promise_there_is_no_profile(tmp_path):
    with pytest.raises(ConfigError, match="No threshold keeps a risk of 0.02 .* 24 prompts"):
        calibrated(tmp_path, prompts=PROMPTS[:30], config=CONFIG.replace(risk=0.02))
    target = RandomTarget(16)
    liar = HybridDecoder(target, drafter=ConfidentDrafter(target, flattery=0.3))
    (tmp_path / "liar").mkdir()
    with pytest.raises(ConfigError, match="No threshold keeps a risk of 0.1"):
        calibrated(tmp_path / "liar", liar)
    assert not list(tmp_path.rglob("profile.json"))


def test_a_drafter_that_does_not_say_how_sure_it_is(tmp_path):
    model = HybridDecoder(RandomTarget(4), drafter="ngram")
    prompts = random_prompts(*[9] * 30, vocab_size=4)
    with pytest.raises(ConfigError, match="does not say how sure it is. Use an adapter"):
        calibrated(tmp_path, model, prompts)


def test_accepted_thresholds_keep_the_promise(tmp_path, monkeypatch):
    """100 calibrations on a simulated population, of which at most 5 % may be wrong.

    Tokens that reach threshold t disagree with probability 1.1 (1 - t) on average, prompts differ
    widely. With a risk of 0.1 the thresholds down to 0.93 keep the promise, 0.9 and below break it
    by little. More than 11 wrong ones of 100 have odds of 1 in 200 if 5 % are.
    """
    rng = Random(5)
    fit = judged(tokens(1, 0.95, 20, 1))

    def prompt(threshold):
        mean = 1.1 * (1 - threshold)
        share = rng.betavariate(mean, 1 - mean)  # of a prompt: 0 or 1 more often than its mean
        number = rng.randint(0, 12)
        wrong = sum(rng.random() < share for _ in range(number))
        return PromptEvidence(20, 10, number, float(wrong), ())

    def collected(decoder, prompts, params, strategy, run, file):
        if run == "fit":
            return [fit] * 4
        return [prompt(float(run.split()[1])) for _ in prompts]

    monkeypatch.setattr(calibrate, "collect", collected)
    monkeypatch.setattr(calibrate, "worth_testing", lambda first, risk: [0.97, 0.93, 0.9, 0.87])
    monkeypatch.setattr(calibrate, "upper_bound", lambda *_: 1.0)  # takes long, decides nothing
    model, prompts, outcomes = confident_decoder(), [[1]] * 750, []
    for _ in range(100):
        laxest = 1.0
        with suppress(ConfigError):  # no threshold keeps it
            profile = calibrate_profile(model, prompts, CONFIG, tmp_path / "profile.json")
            laxest = profile.thresholds[-1].threshold
        outcomes.append(laxest)
    wrong = sum(own < 0.93 for own in outcomes)
    assert wrong <= 11
    assert sum(own < 1 for own in outcomes) > 50, "the test has no power"
