"""`Routing`: risk with a profile, what is kept between calls, and records of runs."""

from __future__ import annotations

import json
from contextlib import closing
from itertools import islice, zip_longest

import pytest
import torch
from fakes import RandomTarget, decoder, with_eos
from mixed_modes import NEW, PROMPTS, K, greedy, make, tiny
from profiles import NEVER, answers, lying_clock, made_up, new_decoder, told

from hybrid import HybridDecoder, SamplingParams, Strategy
from hybrid.decode import timing
from hybrid.errors import CheckpointError, ConfigError
from hybrid.models.adapter import load_adapter
from hybrid.models.draft_config import DraftConfig, base_shape
from hybrid.router.explain import reasons
from hybrid.router.monitor import RiskMonitor
from hybrid.router.record import read_run, replay
from hybrid.training.self_diffusion.draft_model import DraftModel
from hybrid.training.self_diffusion.export import save_adapter
from hybrid.types import Mode, Source

PARAMS = {
    "greedy": SamplingParams(max_new_tokens=24),
    "sampled": SamplingParams(max_new_tokens=24, temperature=0.9, top_p=0.95, seed=7),
}
each_params = pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)


def trusting(params=PARAMS["greedy"], risk=0.5, **fields):
    """A profile that trusts every drafted token of `new_decoder()`, of which half are wrong."""
    fields = {"temperature": params.temperature, **fields}
    return made_up(new_decoder(), 0.0, risk=risk, **fields)


def with_profile(profile, risk=0.5, **settings):
    return Strategy.preset("hybrid", risk=risk, profile=profile, **settings)


# Risk


@each_params
def test_what_is_trusted_is_committed_and_accounted_for(params):
    results = new_decoder().generate(PROMPTS, params, strategy=with_profile(trusting(params)))
    for result in results:
        stats = result.stats
        assert stats.num_unverified == result.sources.count(Source.DIFFUSION_ONLY) > 0
        assert stats.forwards_by_mode["diffusion-only"] > 0
        assert stats.num_new_tokens == 24
    unverified, wrong = disagreeing(results)
    assert 0 < wrong < unverified
    plain = new_decoder().generate(PROMPTS, params, strategy="ar")
    assert answers(results) != answers(plain)


def test_greedy_disagreement_is_another_argmax():
    model = new_decoder()
    result = model.generate(PROMPTS[0], strategy=with_profile(trusting()), max_new_tokens=24)
    text, disagreeing = list(PROMPTS[0]), 0
    for token, source in zip(result.token_ids, result.sources, strict=True):
        (best,) = greedy(model.backbone, tuple(text), 1)
        assert source is Source.DIFFUSION_ONLY or token == best
        disagreeing += token != best
        text.append(token)
    assert result.stats.num_unverified_disagreeing == disagreeing > 0


@pytest.mark.parametrize("kind", ["late", "combined"])
def test_a_profile_that_trusts_nothing_gives_the_tokens_of_ar(kind):
    profile = made_up(new_decoder(kind), NEVER)
    results = new_decoder(kind).generate(
        PROMPTS, strategy=with_profile(profile), max_new_tokens=NEW
    )
    backbone = new_decoder(kind).backbone
    assert answers(results) == [greedy(backbone, tuple(p), NEW) for p in PROMPTS]
    assert [r.stats.num_unverified for r in results] == [0, 0, 0]
    assert sum(r.stats.num_accepted for r in results) > 0


@each_params
@pytest.mark.parametrize("cost", ["forwards", "measured"])
def test_text_depends_neither_on_the_clock_nor_on_the_batch(params, cost):
    profile = trusting(params)
    profile = profile.replace(router={**profile.router, "cost": cost})
    strategy = with_profile(profile)
    together = new_decoder().generate(PROMPTS, params, strategy=strategy)
    backwards = new_decoder().generate(PROMPTS[::-1], params, strategy=strategy)[::-1]
    with lying_clock(3):
        lied_to = new_decoder().generate(PROMPTS, params, strategy=strategy)
    alone = [new_decoder().generate(p, params, strategy=strategy) for p in PROMPTS]
    assert sum(r.stats.num_unverified for r in alone) > 10
    for found in (together, backwards, lied_to):
        assert [told(r) for r in found] == [told(r) for r in alone]


def disagreeing(results):
    unverified = sum(r.stats.num_unverified for r in results)
    return unverified, sum(r.stats.num_unverified_disagreeing for r in results)


def test_the_promise_is_kept_across_the_calls_of_a_decoder_and_begins_anew_in_another():
    """Half of what the profile trusts is wrong, and a tenth is allowed."""
    profile = trusting(risk=0.1)
    model, strategy = new_decoder(), with_profile(profile, risk=0.1)
    results = [
        model.generate(p, strategy=strategy, max_new_tokens=24) for _ in range(6) for p in PROMPTS
    ]
    unverified, wrong = disagreeing(results)
    (monitor,) = model._parts.routing._monitors.values()
    assert (monitor.unverified, monitor.disagreeing) == (unverified, wrong)
    assert wrong <= 0.1 * unverified + monitor.allowance * monitor.accounts
    assert results[-1].stats.num_unverified == 0, "the account is empty"
    first = new_decoder().generate(PROMPTS[0], strategy=strategy, max_new_tokens=24)
    assert told(first) == told(results[0])
    assert first.stats.num_unverified > 0


def test_streams_that_interleave_share_an_account():
    model, strategy = new_decoder(), with_profile(trusting(risk=0.1), risk=0.1)
    streams = [model.stream(p, strategy=strategy, max_new_tokens=24) for p in PROMPTS]
    results = [e.result for some in zip_longest(*streams) for e in some if e and e.result]
    (monitor,) = model._parts.routing._monitors.values()
    assert (monitor.unverified, monitor.disagreeing) == disagreeing(results)
    assert min(r.stats.num_unverified for r in results) > 0


def test_without_a_monitor_the_threshold_stays_in_force():
    strategy = with_profile(trusting(risk=0.1), risk=0.1, is_monitored=False)
    model = new_decoder()
    for _ in range(3):
        result = model.generate(PROMPTS[0], strategy=strategy, max_new_tokens=60)
        assert result.stats.num_unverified_disagreeing > 0.2 * result.stats.num_unverified > 4
    assert model._parts.routing._monitors == {}


def test_a_risk_asks_for_a_profile_and_says_how_to_make_one():
    with pytest.raises(ConfigError, match="risk: got 0.1, but model has no profile") as refused:
        new_decoder().generate(PROMPTS[0], risk=0.1)
    assert "`hybrid calibrate`" in str(refused.value)


CHANGED = {
    "model": ({"model": "other"}, {}, "got model '.*', expected 'other'"),
    "adapter": ({"adapter": "other"}, {}, "got adapter None, expected 'other'"),
    "temperature": ({"temperature": 0.7}, {}, "got temperature 0.0, expected 0.7"),
    "risk": ({"risk": 0.6}, {}, "got risk 0.5, expected 0.6 or more"),
    "cost": ({}, {"cost": "measured"}, "cost: got measured, expected forwards"),
    "block": ({}, {"block_size": 3}, "num_draft_tokens: got 2, expected 4"),
    "modes": ({}, {"modes": (Mode.AR,)}, "modes: got"),
}


@pytest.mark.parametrize(("fields", "settings", "said"), CHANGED.values(), ids=CHANGED)
def test_a_profile_of_something_else_is_refused(fields, settings, said):
    strategy = with_profile(trusting(**fields), **settings)
    with pytest.raises(ConfigError, match=said):
        new_decoder().generate(PROMPTS[0], strategy=strategy)


def test_what_the_profile_was_calibrated_with_may_be_said_again():
    profile = trusting()
    own = {"cost": "forwards", "block_size": K + 1, "modes": profile.router["modes"]}
    said, unsaid = (
        new_decoder().generate(PROMPTS[0], PARAMS["greedy"], strategy=strategy)
        for strategy in (with_profile(profile, **own), with_profile(profile))
    )
    assert told(said) == told(unsaid)


def test_at_risk_0_a_profile_gives_the_first_counts_if_it_fits():
    counts = {"cells": [], "kinds": [["fresh", 1, 0.0, 30.0]], "trust": [1.0, 30.0]}
    for fields, known in (({}, True), ({"model": "other"}, False)):
        model = new_decoder()
        strategy = with_profile(trusting(acceptance=counts, **fields), risk=0.0)
        _, router = model._parts.of_preset("hybrid", strategy.settings, PARAMS["greedy"], 1)
        assert (router.profile is not None) == known
        result = model.generate(PROMPTS[0], strategy=strategy, max_new_tokens=NEW)
        assert list(result.token_ids) == greedy(model.backbone, tuple(PROMPTS[0]), NEW)


def test_risk_given_beside_a_strategy_replaces_its_own():
    profile = trusting()
    beside, within = (
        new_decoder().generate(PROMPTS[0], PARAMS["greedy"], strategy=strategy, risk=risk)
        for strategy, risk in ((with_profile(profile, 0.0), 0.5), (with_profile(profile), None))
    )
    assert told(beside) == told(within)
    assert beside.stats.num_unverified > 0
    with pytest.raises(ConfigError, match="risk: got 0.5 for strategy 'ar', expected 'hybrid'"):
        new_decoder().generate(PROMPTS[0], strategy="ar", risk=0.5)


def test_the_profile_beside_the_adapter_is_found(tmp_path):
    backbone = tiny()
    config = DraftConfig(K, 1, (0, 2), 2, 4.0, base_shape(backbone))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tensors = DraftModel(backbone, config).adapter_tensors()
    save_adapter(tmp_path, config, tensors, base_model="tiny")
    model = HybridDecoder(backbone, adapter=load_adapter(backbone, tmp_path))
    with pytest.raises(ConfigError, match="no profile"):
        model.generate(PROMPTS[0], risk=0.5)
    assert model.identity()[1] is not None
    made_up(model, 0.0, risk=0.5).save(tmp_path / "profile.json")
    assert model.generate(PROMPTS[0], risk=0.5, max_new_tokens=24).stats.num_unverified > 0
    (tmp_path / "profile.json").write_text("{")
    with pytest.raises(CheckpointError, match="not a profile that can be used"):
        model.generate(PROMPTS[0], risk=0.5)


def test_a_drafter_without_confidences_commits_nothing_unverified():
    model = decoder(tiny(), "ngram")
    profile = made_up(model, 0.0, risk=0.5)
    result = model.generate([1, 2, 3] * 5, strategy=with_profile(profile), max_new_tokens=NEW)
    assert list(result.token_ids) == greedy(model.backbone, (1, 2, 3) * 5, NEW)
    assert result.stats.num_unverified == 0


# What is kept


def test_costs_are_measured_once_for_each_kind_of_call(monkeypatch):
    shapes, target_ms = [], timing.PassTimer.target_ms

    def counted(self, *args):
        shapes.append(args)
        return target_ms(self, *args)

    monkeypatch.setattr(timing.PassTimer, "target_ms", counted)
    model = new_decoder()
    model.generate(PROMPTS[0], strategy="hybrid", max_new_tokens=4)
    once = len(shapes)
    assert once > 3
    model.generate(PROMPTS[1], strategy="hybrid", max_new_tokens=4)
    model.generate(PROMPTS[1], strategy="hybrid", temperature=1.0, max_new_tokens=4)
    assert len(shapes) == once
    model.generate(PROMPTS, strategy="hybrid", max_new_tokens=4)
    assert len(shapes) == 2 * once
    assert {rows for rows, *_ in shapes[once:]} == {3}
    forwards = Strategy.preset("hybrid", cost="forwards")
    model.generate(PROMPTS[0], strategy=forwards, max_new_tokens=4)
    assert len(shapes) == 2 * once


def test_a_call_goes_on_with_the_costs_and_counts_of_the_last_one():
    model = new_decoder()
    with closing(model.stream(PROMPTS[0], strategy="hybrid", max_new_tokens=40)) as stream:
        assert len(list(islice(stream, 6))) == 6
    model.generate(PROMPTS[0], strategy="hybrid", max_new_tokens=40)
    settings = Strategy.preset("hybrid").settings
    _, router = model._parts.of_preset("hybrid", settings, SamplingParams(), 1)
    _, fresh = new_decoder()._parts.of_preset("hybrid", settings, SamplingParams(), 1)
    assert router.header()["costs"]["factors"], "no step has corrected them"
    assert router.header()["acceptance"]["cells"]
    assert fresh.header()["costs"]["factors"] == []
    assert fresh.header()["acceptance"] is None


# Records


def replayed(path):
    header, records = read_run(path)
    decisions = list(replay(header, records))
    assert decisions
    assert all(decision.agrees for decision in decisions)
    return header, records, decisions


@each_params
@pytest.mark.parametrize("risk", [0.0, 0.5])
@pytest.mark.parametrize("cost", ["forwards", "measured"])
def test_a_recorded_run_is_decided_again_as_it_was(tmp_path, cost, risk, params):
    profile = trusting(params)
    profile = profile.replace(router={**profile.router, "cost": cost})
    strategy, path = with_profile(profile, risk, cost=cost), tmp_path / "run.jsonl"
    model = new_decoder()
    for prompts in ([PROMPTS[0]], PROMPTS):
        for _ in range(2):  # the second call begins with what the first has taught
            results = model.generate(prompts, params, strategy=strategy, record=path)
            header, records, decisions = replayed(path)
            assert header.strategy == "hybrid"
            for index, result in enumerate(results):
                steps = [s for record in records for s in record.rows if s.index == index]
                assert tuple(t for s in steps for t in s.tokens) == result.token_ids
            # Rows that must say the same whatever is beside them are decided by themselves.
            groups = {tuple(reason["rows"]) for reason in reasons(decisions)}
            assert (max(map(len, groups)) > 1) == (
                len(prompts) > 1 and risk == 0 and params.is_greedy
            )


def test_rows_that_end_early_and_drafters_that_fail_replay_too(tmp_path):
    drafter, backbone = make("combined")
    backbone = with_eos(backbone, 3)
    model = HybridDecoder(backbone, drafter=drafter)
    results = model.generate(PROMPTS, strategy="hybrid", record=tmp_path / "a", max_new_tokens=40)
    assert len({len(r.token_ids) for r in results}) > 1
    replayed(tmp_path / "a")


def test_a_closed_stream_leaves_a_record_and_one_that_never_began_none(tmp_path):
    model, path = new_decoder(), tmp_path / "run.jsonl"
    model.stream(PROMPTS[0], strategy="hybrid", record=path).close()
    assert list(tmp_path.iterdir()) == []
    for num_events in (1, 4):
        stream = model.stream(PROMPTS[0], strategy="hybrid", record=path, max_new_tokens=40)
        for _ in range(num_events):
            next(stream)
        stream.close()
        header, records = read_run(path)
        assert len(records) == num_events
        assert all(decision.agrees for decision in replay(header, records))
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_of_the_target_leaves_a_record_too(tmp_path):
    target, path = RandomTarget(6), tmp_path / "run.jsonl"
    model = decoder(target)
    strategy = Strategy.preset("hybrid", cost="forwards")
    target.fail_at = {5: RuntimeError("broken")}
    with pytest.raises(RuntimeError, match="broken"):
        model.generate([1, 2], strategy=strategy, record=path, max_new_tokens=20)
    assert len(read_run(path)[1]) == 4


def test_a_record_that_cannot_be_is_refused(tmp_path):
    path = tmp_path / "run.jsonl"
    for strategy in ("ar", "speculative", None):
        with pytest.raises(ConfigError, match="record: got strategy '.*', expected 'hybrid'"):
            new_decoder().generate(PROMPTS[0], strategy=strategy, record=path)
    target = RandomTarget(6)
    target.supports_rollback = False
    with (
        pytest.warns(RuntimeWarning, match="token by token"),
        pytest.raises(ConfigError, match="record: .* no decision to keep"),
    ):
        decoder(target).generate([1], strategy="hybrid", record=path)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        new_decoder().generate(PROMPTS[0], strategy="hybrid", record=tmp_path / "file" / "run")
    assert not path.exists()


def test_a_record_is_plain_json_of_the_run(tmp_path):
    path = tmp_path / "run.jsonl"
    new_decoder().generate(PROMPTS[0], strategy="hybrid", record=path, max_new_tokens=5)
    first, *steps = map(json.loads, path.read_text().splitlines())
    assert first["model"] == "model"
    assert first["router"]["config"]["cost"] == "measured"
    assert len(steps) > 1


def test_the_monitor_of_a_call_is_in_its_record(tmp_path):
    model, strategy = new_decoder(), with_profile(trusting(risk=0.1), risk=0.1)
    for index in range(2):
        path = tmp_path / f"{index}.jsonl"
        model.generate(PROMPTS[0], strategy=strategy, record=path, max_new_tokens=24)
    monitors = [RiskMonitor(**read_run(p)[0].router["monitor"]) for p in sorted(tmp_path.iterdir())]
    assert monitors[0].unverified == 0
    assert monitors[1].unverified > 0
