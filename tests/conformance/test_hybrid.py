"""Strategy "hybrid" without risk: the target's tokens and law, whatever the clock makes it do."""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest
from random import Random

import pytest
import torch
from carrying import CarryingFake, CarryingTarget
from exact_laws import chi_square, enumerated_law, exact_law
from fakes import (
    GarbageDrafter,
    RaisingDrafter,
    SkewedDrafter,
    decoder,
    random_adapter,
    random_prompts,
    tiny_backbone,
    with_eos,
)
from mixed_modes import NEW, PROMPTS, VOCAB, greedy, tiny
from profiles import answers, lying_clock, new_decoder, told

from hybrid import HybridDecoder, SamplingParams, Strategy
from hybrid.decode.fallback import DrafterWarning
from hybrid.models.hf import HFBackbone
from hybrid.models.tiny import tiny_checkpoint
from hybrid.router.config import RouterConfig
from hybrid.router.hybrid import HybridRouter
from hybrid.types import Mode
from hybrid.verifiers.block import accept_by_block
from hybrid.verifiers.rejection import accept_by_token

DRAFTERS = ("none", "ngram", "self-diffusion", "combined", "dflash")
CARRYING = {"self-diffusion", "combined"}
COSTS = ("measured", "forwards")
PENALTIES = {
    "repetition": SamplingParams(repetition_penalty=1.3, max_new_tokens=NEW),
    "counts": SamplingParams(presence_penalty=1.5, frequency_penalty=0.7, max_new_tokens=NEW),
    "min-new": SamplingParams(min_new_tokens=9, max_new_tokens=NEW),
}


def hybrid(**settings):
    return Strategy.preset("hybrid", **settings)


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_equals_the_reference(drafter, cost):
    seen = Counter()
    for family in ("llama", "mistral-window"):
        # The longest prompt and its answer fill the context to its last position.
        backbone = tiny(family, max_position_embeddings=17 + NEW)
        expected = [greedy(backbone, tuple(p), NEW) for p in PROMPTS]
        assert max(len(set(answer)) for answer in expected) > 2
        for size in (None, 2) if drafter in CARRYING else (None,):
            model = decoder(backbone, drafter)
            for _ in range(2):  # the second call knows what the first has learned
                strategy = hybrid(cost=cost, block_size=size)
                results = model.generate(PROMPTS, strategy=strategy, max_new_tokens=NEW)
                assert answers(results) == expected
                for result in results:
                    seen.update(result.stats.forwards_by_mode)
                    assert result.stats.num_unverified == 0
                alone = model.generate(PROMPTS[0], strategy=strategy, max_new_tokens=NEW)
                assert list(alone.token_ids) == expected[0]
    if drafter in CARRYING and cost == "forwards":  # then carrying is free
        assert seen["fused"] + seen["one-pass"] > 10
    if drafter == "none":
        assert set(seen) == {"ar"}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_it_may_cross_eos_and_the_limit_anywhere(drafter):
    backbone, prompt = tiny("qwen2"), PROMPTS[0]
    answer = greedy(backbone, tuple(prompt), NEW)
    for at in range(NEW):
        for end in ("eos", "limit"):
            target = with_eos(backbone, answer[at]) if end == "eos" else backbone
            limit = NEW if end == "eos" else at + 1
            expected = answer[: answer.index(answer[at]) + 1] if end == "eos" else answer[:limit]
            model = decoder(target, drafter)
            result = model.generate(prompt, strategy=hybrid(cost="forwards"), max_new_tokens=limit)
            assert list(result.token_ids) == expected
            assert result.finish_reason == ("stop" if end == "eos" else "length")


@pytest.mark.parametrize("params", PENALTIES.values(), ids=PENALTIES)
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("drafter", DRAFTERS[1:])
def test_greedy_with_transforms_equals_ar(drafter, cost, params):
    backbone = with_eos(tiny(), *([3] if params.min_new_tokens else []))
    model = decoder(backbone, drafter)
    expected = model.generate(PROMPTS, params, strategy="ar")
    free = model.generate(PROMPTS, strategy="ar", max_new_tokens=NEW)
    assert answers(expected) != answers(free), "nothing is transformed"
    found = model.generate(PROMPTS, params, strategy=hybrid(cost=cost))
    assert answers(found) == answers(expected)


def test_greedy_on_transformers_own_classes(tmp_path):
    path = tiny_checkpoint(tmp_path, "llama", vocab_size=VOCAB, tokenizer=False)
    backbone = HFBackbone.from_path(path, "cpu", torch.float32)
    for cost in COSTS:
        model = HybridDecoder(backbone, drafter="ngram")
        expected = model.generate(PROMPTS, strategy="ar", max_new_tokens=NEW)
        found = model.generate(PROMPTS, strategy=hybrid(cost=cost), max_new_tokens=NEW)
        assert answers(found) == answers(expected)


def test_only_the_modes_that_are_asked_for():
    """A pass that reads the last carried slots, and carries none, is a speculative one."""
    cases = {
        (Mode.AR,): {"ar"},
        (Mode.SPECULATIVE,): {"ar", "speculative"},
        (Mode.AR, Mode.FUSED): {"ar", "speculative", "fused"},
    }
    for modes, expected in cases.items():
        for fields in ({}, {"temperature": 1.0, "seed": 1}):
            strategy = hybrid(modes=modes, cost="forwards")
            model = new_decoder()
            stats = model.generate(PROMPTS[0], strategy=strategy, max_new_tokens=30, **fields).stats
            assert set(stats.forwards_by_mode) <= expected
            assert Mode.SPECULATIVE in modes or stats.num_draft_forwards == 0
            assert Mode.FUSED not in modes or stats.forwards_by_mode["fused"] > 3


@pytest.mark.parametrize("drafter", ["raises", "garbage"])
def test_a_drafter_that_fails_costs_a_warning(drafter):
    broken = {
        "raises": RaisingDrafter(ValueError("no")),
        "garbage": GarbageDrafter(lambda batch, k: None),
    }
    backbone = tiny()
    model = decoder(backbone, broken[drafter])
    with pytest.warns(DrafterWarning):
        result = model.generate(PROMPTS[0], strategy="hybrid", max_new_tokens=NEW)
    assert list(result.token_ids) == greedy(backbone, tuple(PROMPTS[0]), NEW)


# Sampling


@pytest.mark.parametrize("rule", [accept_by_token, accept_by_block])
@pytest.mark.parametrize("cost", COSTS)
def test_the_sampled_law_is_exactly_the_targets(cost, rule, monkeypatch):
    target, drafter, prompt, num_new = CarryingTarget(2, seed=5), CarryingFake(2, 2), [1, 0, 1], 4
    router = HybridRouter(RouterConfig(num_draft_tokens=2, num_slots=2, cost=cost))
    with lying_clock(1):
        law, seen = enumerated_law(target, drafter, router, rule, prompt, num_new, monkeypatch)
    expected = exact_law(target, prompt, num_new)
    assert sum(law.values()) == pytest.approx(1, abs=1e-6)
    assert max(abs(law[answer] - p) for answer, p in expected.items()) < 1e-6
    if cost == "forwards":
        assert any(first_slot > 1 for _, first_slot in seen), "no carried slot was drafted from"


def test_a_real_model_samples_from_its_law(monkeypatch):
    """Pearson's chi-square over the 81 answers of 4 tokens, 1,000 rows of a real model.

    80 degrees of freedom at most: a right decoder exceeds 135 with odds below 1 in 10,000.
    """
    monkeypatch.setattr("secrets.randbits", Random(3).getrandbits)  # rows without a seed differ
    backbone = tiny_backbone(vocab_size=3)
    adapter = random_adapter(backbone, 3, seed=1)
    model = HybridDecoder(backbone, adapter=adapter, drafter="self-diffusion")
    prompt, batch, num_runs, num_new = [1, 2, 1], 50, 1000, 4
    params = SamplingParams(temperature=2.0, max_new_tokens=num_new)
    strategy = hybrid(cost="forwards", block_size=3)
    seen, by_mode = Counter(), Counter()
    for _ in range(num_runs // batch):
        for result in model.generate([prompt] * batch, params, strategy=strategy):
            seen[result.token_ids] += 1
            by_mode.update(result.stats.forwards_by_mode)
    assert by_mode["fused"] + by_mode["one-pass"] > 100
    law = exact_law(backbone, prompt, num_new, temperature=2.0)
    statistic, num_cells = chi_square(seen, law, num_runs)
    assert num_cells > 30
    assert statistic < 135


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("drafter", ["ngram", "self-diffusion", "combined", "dflash", "skewed"])
def test_a_seed_gives_the_same_tokens_whatever_the_clock_says(drafter, cost):
    prompts = random_prompts(9, 1, 17, 4, vocab_size=VOCAB, seed=2)
    backbone = tiny()
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_new_tokens=NEW)

    def fresh():
        return decoder(backbone, SkewedDrafter(VOCAB, 3) if drafter == "skewed" else drafter)

    strategy, model = hybrid(cost=cost), fresh()
    alone = [model.generate(p, params, strategy=strategy) for p in prompts]
    assert sum(r.stats.num_drafted for r in alone) > 0
    stories = [model.generate(prompts, params, strategy=strategy)]  # the second call
    for seed in range(2):
        with lying_clock(seed):
            stories.append(fresh().generate(prompts, params, strategy=strategy))
            backwards = fresh().generate(prompts[::-1], params, strategy=strategy)
            stories.append(backwards[::-1])
    for story in stories:
        assert [told(r) for r in story] == [told(r) for r in alone]


def test_greedy_tokens_do_not_follow_the_clock_though_the_steps_do():
    backbone = tiny()
    expected = [greedy(backbone, tuple(p), NEW) for p in PROMPTS]
    steps = set()
    for seed in range(4):
        with lying_clock(seed):
            results = new_decoder().generate(PROMPTS, strategy="hybrid", max_new_tokens=NEW)
        assert answers(results) == expected
        steps.add(tuple(r.sources for r in results))
    assert len(steps) > 1, "nothing followed the clock"


def test_a_clock_that_stands_still_is_survived(monkeypatch):
    monkeypatch.setattr("time.perf_counter", lambda: 1.0)
    model = new_decoder()
    expected = greedy(model.backbone, tuple(PROMPTS[0]), NEW)
    result = model.generate(PROMPTS[0], strategy="hybrid", max_new_tokens=NEW)
    assert list(result.token_ids) == expected


def test_greedy_and_sampled_rows_share_a_decoder_and_interleave():
    model = new_decoder()
    fields = [{}, {"temperature": 1.0, "seed": 3}, {}]
    alone = [
        new_decoder().generate(p, strategy="hybrid", max_new_tokens=NEW, **own)
        for p, own in zip(PROMPTS, fields, strict=True)
    ]
    streams = [
        model.stream(p, strategy="hybrid", max_new_tokens=NEW, **own)
        for p, own in zip(PROMPTS, fields, strict=True)
    ]
    last = [
        [event.result for event in events if event][-1]
        for events in zip(*zip_longest(*streams), strict=True)
    ]
    assert [r.token_ids for r in last] == [r.token_ids for r in alone]
