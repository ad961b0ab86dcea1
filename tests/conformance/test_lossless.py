"""Speculative output is the target's own: same tokens when greedy, same law when sampled."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from functools import cache

import pytest
import torch
from exact_laws import exact_law
from fakes import (
    FAMILIES,
    RandomTarget,
    SkewedDrafter,
    UniformDrafter,
    always_right,
    always_wrong,
    decoder,
    make_engine,
    random_adapter,
    random_prompts,
    sometimes_wrong,
    tiny_backbone,
    with_eos,
)

from hybrid import HybridDecoder, registry
from hybrid.attention.pattern import causal
from hybrid.decode.loop import run
from hybrid.decode.reference import reference_greedy
from hybrid.params import SamplingParams
from hybrid.types import Write

NEW = 15
PROMPTS = random_prompts(9, 1)
DTYPES = {"float32": torch.float32, "float64": torch.float64}
ORACLES = {"right": always_right, "wrong": always_wrong, "sometimes-wrong": sometimes_wrong}
DRAFTERS = [*sorted(registry.names("drafter")), *ORACLES]
VERIFIERS = sorted(
    name for name in registry.names("verifier") if registry.load("verifier", name).lossless
)


@cache
def references(family, dtype):
    """The prompts with their greedy answers, from the slow oracle."""
    backbone = tiny_backbone(family, DTYPES[dtype])
    return [prompt + reference_greedy(backbone, prompt, NEW) for prompt in PROMPTS]


def make_drafter(name, sequences, count):
    return ORACLES[name](sequences, count) if name in ORACLES else name


def answers(results):
    return [list(result.token_ids) for result in results]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_the_reference(family, dtype, drafter):
    sequences = references(family, dtype)
    backbone = tiny_backbone(family, DTYPES[dtype])
    expected = [s[len(p) :] for s, p in zip(sequences, PROMPTS, strict=True)]
    assert max(len(set(answer)) for answer in expected) > 3, "a constant answer proves little"
    cases = list(itertools.product((1, 2, 7), VERIFIERS))
    # Rounding is what float64 adds; the rules are the same.
    for count, verifier in cases if dtype == "float32" else cases[::4]:
        model = decoder(
            backbone,
            make_drafter(drafter, sequences, count),
            verifier=verifier,
            num_draft_tokens=count,
        )
        results = model.generate(PROMPTS, max_new_tokens=NEW)
        assert answers(results) == expected
        if drafter in ORACLES:
            assert sum(r.stats.num_drafted for r in results) > 0
            rates = {r.stats.acceptance_rate for r in results}
            assert drafter != "right" or rates == {1.0}
            assert drafter != "wrong" or rates == {0.0}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_k_may_cross_eos_and_the_limit_anywhere(drafter):
    backbone, sequences = tiny_backbone("qwen2"), references("qwen2", "float32")
    prompt, answer = PROMPTS[0], sequences[0][len(PROMPTS[0]) :]
    for at in range(NEW):
        for end in ("eos", "limit"):
            target = with_eos(backbone, answer[at]) if end == "eos" else backbone
            limit = NEW if end == "eos" else at + 1
            expected = reference_greedy(target, prompt, limit, target.eos_token_ids)
            model = decoder(target, make_drafter(drafter, sequences, 7), num_draft_tokens=7)
            result = model.generate(prompt, max_new_tokens=limit)
            assert list(result.token_ids) == expected
            assert result.finish_reason == ("stop" if end == "eos" else "length")
            assert len(result.sources) == len(expected) == result.stats.num_new_tokens


PENALTIES = [
    SamplingParams(repetition_penalty=1.3, max_new_tokens=NEW),
    SamplingParams(presence_penalty=1.5, frequency_penalty=0.7, max_new_tokens=NEW),
    SamplingParams(frequency_penalty=-0.5, repetition_penalty=0.8, max_new_tokens=NEW),
    SamplingParams(min_new_tokens=9, max_new_tokens=NEW),
]


@pytest.mark.parametrize("params", PENALTIES, ids=["repetition", "counts", "rewards", "min-new"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_with_transforms_equals_ar(drafter, params):
    backbone = tiny_backbone("qwen2")
    free = references("qwen2", "float32")
    # Ids that the plain answers use, so that min_new_tokens has something to forbid.
    backbone = with_eos(backbone, free[0][len(PROMPTS[0]) + 2], free[1][len(PROMPTS[1]) + 5])
    expected = answers(decoder(backbone).generate(PROMPTS, params, strategy="ar"))
    plain = answers(decoder(backbone).generate(PROMPTS, strategy="ar", max_new_tokens=NEW))
    assert expected != plain, "the transforms change nothing here"
    sequences = [p + a for p, a in zip(PROMPTS, expected, strict=True)]
    for count in (1, 7):
        model = decoder(backbone, make_drafter(drafter, sequences, count), num_draft_tokens=count)
        assert answers(model.generate(PROMPTS, params)) == expected


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_committed_cache_equals_a_fresh_prefill_after_every_step(family, drafter):
    backbone = tiny_backbone(family)
    sequences = references(family, "float32")
    model = decoder(backbone, make_drafter(drafter, sequences, 4), num_draft_tokens=4)
    parts = model._parts.drafter()
    params = SamplingParams(max_new_tokens=NEW)
    engine, rows = make_engine(backbone, parts, PROMPTS, params)
    steps = 0
    for record in run(engine, rows):
        steps += 1
        for row in rows:
            if row.num_new_tokens == 0:  # its prefill is still to come
                continue
            length = engine.cache.lengths[row.row]
            assert length == row.cached_len
            fresh = backbone.new_cache(1, length)
            forward(backbone, [row.tokens[:length]], fresh, [0], write=Write.COMMIT)
            ours = engine.cache.data[:, :, row.row, :, :length]
            torch.testing.assert_close(ours, fresh.data[:, :, 0, :, :length], rtol=0, atol=1e-5)
        assert record.rows
    assert steps > len(PROMPTS)
    assert engine.cache.lengths == [0] * len(PROMPTS)


def forward(backbone, inputs, cache, rows, **kwargs):
    """A causal pass that continues `rows`."""
    starts, num_tokens = [cache.lengths[row] for row in rows], len(inputs[0])
    positions = torch.tensor(starts)[:, None] + torch.arange(num_tokens)
    pattern = causal(starts, num_tokens)
    return backbone.forward(torch.tensor(inputs), positions, pattern, cache, rows, **kwargs)


# Sampling


SMALL_DRAFTERS = {
    "none": registry.load("drafter", "none"),
    "ngram": registry.load("drafter", "ngram"),
    "uniform": lambda: UniformDrafter(6, 2),
    "skewed": lambda: SkewedDrafter(6, 2),
}


@pytest.mark.parametrize("verifier", ["rejection", "block"])
@pytest.mark.parametrize("drafter", SMALL_DRAFTERS)
def test_sampled_output_follows_the_target(verifier, drafter):
    """Chi-square over all 216 answers of 3 tokens, cells pooled to an expectation of at least 5.

    False alarms: the statistic's z-value (Wilson-Hilferty) exceeds 4 with odds of about 1 in
    30,000 per case. The seeds are fixed, so a pass stays a pass.
    """
    vocab, num_runs, prompt = 6, 1000, [1, 2, 1, 2, 1]
    target = RandomTarget(vocab, seed=5)
    model = decoder(
        target,
        SMALL_DRAFTERS[drafter](),
        verifier=registry.load("verifier", verifier)(),
        num_draft_tokens=2,
    )
    seen: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for seed in range(num_runs):
        result = model.generate(prompt, temperature=1.0, max_new_tokens=3, seed=seed)
        seen[result.token_ids] += 1
        accepted += result.stats.num_accepted
    assert drafter == "none" or accepted > 0
    observed, expected = [0.0], [0.0]
    for answer, mass in sorted(exact_law(target, prompt, 3).items(), key=lambda kv: kv[1]):
        if expected[-1] >= 5:
            observed.append(0.0)
            expected.append(0.0)
        observed[-1] += seen[answer]
        expected[-1] += num_runs * mass
    assert sum(observed) == num_runs
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    freedom = len(expected) - 1
    assert freedom > 20
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5
    assert z < 4


SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=13, max_new_tokens=NEW, logprobs=2)
GREEDY = SamplingParams(seed=7, max_new_tokens=NEW, logprobs=2)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "drafter", ["none", "ngram", "self-diffusion", "skewed", "sometimes-wrong"]
)
def test_a_row_does_not_depend_on_its_batch(drafter, params):
    prompts = random_prompts(5, 1, 11, 3, vocab_size=64, seed=4)
    backbone = tiny_backbone("llama")
    free = [reference_greedy(backbone, p, NEW) for p in prompts]
    backbone = with_eos(backbone, free[1][3])  # some rows stop early
    sequences = [p + a for p, a in zip(prompts, free, strict=True)]
    named = SkewedDrafter(64) if drafter == "skewed" else make_drafter(drafter, sequences, 4)
    model = decoder(backbone, named, num_draft_tokens=3)
    together = model.generate(prompts, params)
    backwards = model.generate(prompts[::-1], params)[::-1]
    assert len({len(r.token_ids) for r in together}) > 1
    for prompt, *batched in zip(prompts, together, backwards, strict=True):
        alone = model.generate(prompt, params)
        for result in batched:
            assert result.token_ids == alone.token_ids
            assert result.finish_reason == alone.finish_reason
            assert result.sources == alone.sources
            assert result.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
            assert [set(t) for t in result.top_logprobs] == [set(t) for t in alone.top_logprobs]
            assert result.stats.acceptance_histogram == alone.stats.acceptance_histogram


@pytest.mark.parametrize("strategy", ["ar", "speculative", "ngram", "hybrid"])
def test_same_seed_same_tokens(strategy):
    model = decoder(tiny_backbone("llama"), "self-diffusion")
    prompt = PROMPTS[0]

    def sample(seed):
        return model.generate(
            prompt, strategy=strategy, temperature=1.2, seed=seed, max_new_tokens=12
        ).token_ids

    assert sample(1) == sample(1)
    assert len({sample(seed) for seed in range(5)}) > 1
    global_state = torch.random.get_rng_state()
    sample(3)
    assert torch.equal(torch.random.get_rng_state(), global_state)


def test_no_seed_is_a_fresh_seed():
    model = decoder(tiny_backbone("llama"))
    runs = {
        model.generate(PROMPTS[0], temperature=1.5, max_new_tokens=12).token_ids for _ in range(4)
    }
    assert len(runs) > 1


def logits_of_a_step(backbone, prompts, inputs):
    """Prefill each row by itself, then run one pass of all rows; [B, T, V]."""
    cache = backbone.new_cache(len(prompts), 64)
    for row, prompt in enumerate(prompts):
        forward(backbone, [prompt], cache, [row], write=Write.COMMIT)
    return forward(backbone, inputs, cache, range(len(prompts))).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bits_of_a_row_do_not_depend_on_the_batch_or_its_padding(dtype):
    """Widths from 2 on: a float32 product of one row alone uses another routine of the library."""
    backbone = tiny_backbone("llama", dtype)
    prompts = random_prompts(5, 9, 33, 2)
    for width in (2, 5, 9):
        inputs = random_prompts(*[9] * len(prompts), seed=width)
        together = logits_of_a_step(backbone, prompts, inputs)
        for row, prompt in enumerate(prompts):
            alone = logits_of_a_step(backbone, [prompt], [inputs[row][:width]])
            assert torch.equal(alone[0], together[row, :width])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_a_broken_draft_leaves_in_scratch_reaches_nobody(dtype):
    """Keys behind a pass are masked, and a masked NaN would still be a NaN."""
    backbone = tiny_backbone("llama", dtype)
    adapter = random_adapter(backbone)
    adapter.layers[1].input_norm.fill_(float("nan"))
    for max_new_tokens in (2, 3, 9):
        params = {"max_new_tokens": max_new_tokens, "ignore_eos": True}
        model = HybridDecoder(backbone, adapter=adapter, drafter="self-diffusion")
        drafted = model.generate(PROMPTS, **params)
        plain = model.generate(PROMPTS, strategy="ar", **params)
        for ours, expected in zip(drafted, plain, strict=True):
            assert ours.token_ids == expected.token_ids
            assert ours.logprobs is None or all(map(math.isfinite, ours.logprobs))
