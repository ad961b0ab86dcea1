"""Presets that must agree: one system's special case is another."""

from pathlib import Path

import pytest

from hybrid import HybridDecoder, Strategy

GOLDEN = Path(__file__).parents[3] / "golden"
PROMPT, NEW = [5, 17, 3, 40, 8], 20


@pytest.fixture(scope="module")
def llada() -> HybridDecoder:
    return HybridDecoder.from_pretrained(GOLDEN / "llada-rand", dtype="float32")


def run(decoder, name, **parameters):
    strategy = Strategy.preset(name, **parameters)
    result = decoder.generate(PROMPT, strategy=strategy, max_new_tokens=NEW, ignore_eos=True)
    return result.token_ids, result.stats.num_forwards


def test_slowfast_with_features_that_are_always_renewed_is_slowfast(llada):
    parameters = {"block_size": 10, "k_exploration_steps": 3, "high_confidence_threshold": 0.2}
    renewed = {"cache": "dllm-cache", "prompt_interval_steps": 1, "gen_interval_steps": 1}
    assert run(llada, "slowfast", **parameters, **renewed) == run(llada, "slowfast", **parameters)
    stale = {"cache": "dllm-cache", "prompt_interval_steps": 9, "gen_interval_steps": 9}
    tokens, _ = run(llada, "slowfast", **parameters, **stale)
    assert len(tokens) == NEW


def test_an_entropy_bound_of_nothing_commits_the_surest_slot(llada):
    tokens, passes = run(llada, "eb", gamma=0.0)
    assert passes == NEW
    everything, at_once = run(llada, "eb", gamma=1e6)
    assert at_once == 1
    assert everything == run(llada, "fast-dllm", block_size=NEW, threshold=0.0, cache="none")[0]
    assert tokens != everything


def test_fast_dllm_in_steps_without_a_cache_is_llada(llada):
    expected = run(llada, "llada", block_size=5, steps=8)
    assert run(llada, "fast-dllm", block_size=5, steps=8, cache="none") == expected


def test_ssd_is_llada_with_a_step_per_token(llada):
    tokens, _ = run(llada, "llada", steps=NEW)
    ours, passes = run(llada, "ssd")
    assert ours == tokens
    assert passes < NEW


@pytest.fixture(scope="module")
def dream() -> HybridDecoder:
    return HybridDecoder.from_pretrained(GOLDEN / "dream-rand", dtype="float32")


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_steps_bound_the_passes_of_fast_dllm_on_dream_too(dream, cache):
    # With a cache the pass that opens a block commits one slot only; the others make up for it.
    _, passes = run(dream, "fast-dllm", block_size=10, steps=6, cache=cache)
    assert passes == 6


def test_ssd_is_llada_on_dream_too(dream):
    tokens, _ = run(dream, "llada", steps=NEW)
    assert run(dream, "ssd", depth=3)[0] == tokens


def test_a_preset_may_set_the_temperature_itself(llada):
    given = Strategy.preset("llada", temperature=0.9)
    asked = {"max_new_tokens": NEW, "ignore_eos": True, "seed": 4}
    own = llada.generate(PROMPT, strategy=given, **asked).token_ids
    assert own == llada.generate(PROMPT, strategy="llada", temperature=0.9, **asked).token_ids
    assert own != llada.generate(PROMPT, strategy="llada", **asked).token_ids
    cold = Strategy.preset("llada", temperature=0.0)
    greedy = llada.generate(PROMPT, strategy=cold, temperature=0.9, **asked).token_ids
    assert greedy == llada.generate(PROMPT, strategy="llada", **asked).token_ids


def test_dream_top_k_of_all_is_no_truncation(dream):
    every = run(dream, "dream", algorithm="entropy", steps=NEW, top_k=160)
    assert every != run(dream, "dream", algorithm="entropy", steps=NEW)  # Dream's own is 50
