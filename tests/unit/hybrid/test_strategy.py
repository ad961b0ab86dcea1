"""Presets by name: what is refused and what the refusal says."""

from pathlib import Path

import pytest

from hybrid import HybridDecoder, Strategy, registry
from hybrid.errors import ConfigError
from hybrid.types import Mode

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture(scope="module")
def llada() -> HybridDecoder:
    return HybridDecoder.from_pretrained(GOLDEN / "llada-rand", dtype="float32")


@pytest.mark.parametrize(
    ("name", "parameters", "said"),
    [
        ("d3lm", {}, "strategy: got 'd3lm'. Did you mean 'd3llm'"),
        ("d3llm", {"entropy_treshold": 1}, "Did you mean 'entropy_threshold'"),
        ("d3llm", {"block_size": 0}, "strategy 'd3llm': block_size: got 0"),
        ("fast-dllm", {"threshold": 0.5, "steps": 3}, "got threshold and steps, expected one"),
        ("llada", {"self": 1}, "has no parameter 'self'"),
        ("llada", {"name": 1}, "has no parameter 'name'"),
        (["llada"], {}, "strategy: got"),
        (
            "hybrid",
            {"modes": "ar,fusd"},
            "strategy 'hybrid': modes.1: got 'fusd', expected 'prefill'",
        ),
        ("hybrid", {"cost": "time"}, "strategy 'hybrid': cost: got 'time'"),
        ("hybrid", {"risk": 1}, "strategy 'hybrid': risk: got 1"),
    ],
)
def test_bad_presets(name, parameters, said):
    with pytest.raises(ConfigError, match=said):
        Strategy.preset(name, **parameters)


def test_modes_may_be_spelled_as_on_a_command_line():
    spelled = Strategy.preset("hybrid", modes="ar,fused")
    assert spelled == Strategy.preset("hybrid", modes=(Mode.AR, Mode.FUSED))


@pytest.mark.parametrize("name", ["ar", "speculative", "ngram", "hybrid", "sdar", "nemotron"])
def test_what_a_bidirectional_model_cannot_run(llada, name):
    with pytest.raises(ConfigError, match=f"strategy '{name}': ") as refused:
        llada.generate([1, 2], strategy=name, allow_unverified=True)
    assert "For this model: " in str(refused.value)
    assert "llada" in str(refused.value)


def test_a_block_causal_model_verifies_only_when_told():
    sdar = HybridDecoder.from_pretrained(GOLDEN / "sdar-rand", dtype="float32")
    for strategy in ("ar", "speculative"):
        with pytest.raises(ConfigError, match="no autoregressive objective"):
            sdar.generate([1, 2], strategy=strategy)
    told = {"allow_unverified": True, "max_new_tokens": 9, "ignore_eos": True}
    expected = sdar.generate([1, 2], strategy="ar", **told).token_ids
    assert sdar.generate([1, 2], strategy="speculative", **told).token_ids == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.2},
        {"presence_penalty": 1.0},
        {"min_new_tokens": 2},
        {"logprobs": 0},
    ],
)
def test_parameters_that_denoising_does_not_heed_are_refused(llada, fields):
    with pytest.raises(ConfigError, match=f"got {next(iter(fields))}, expected the default"):
        llada.generate([1, 2], **fields)


def test_what_start_refuses_names_the_strategy(llada):
    with pytest.raises(ConfigError, match="strategy 'guided': guide: got nothing"):
        llada.generate([1, 2], strategy="guided")


def test_a_broken_preset_of_somebody_else_spoils_no_other(llada, monkeypatch):
    names = registry.names("preset")
    broken = {**names, "theirs": "no.such.module:Preset"}
    monkeypatch.setattr(registry, "names", lambda kind: broken)
    assert "llada" in llada.strategies
    assert "theirs" not in llada.strategies


def test_the_default_is_what_the_weights_are_meant_for(llada):
    assert llada.resolve_strategy().name == "llada"
    nemotron = HybridDecoder.from_pretrained(GOLDEN / "nemotron-rand", dtype="float32")
    assert nemotron.resolve_strategy().name == "speculative"
    assert nemotron.drafter_name == "self-diffusion"


def test_memory_of_a_denoising_default_counts_a_row_of_logits_per_slot(llada):
    plan = llada.plan_memory(100)
    assert plan["workspace"] >= 100 * llada.backbone.vocab_size * 8


def test_a_block_of_one_drafts_nothing():
    nemotron = HybridDecoder.from_pretrained(GOLDEN / "nemotron-rand", dtype="float32")
    one = Strategy.preset("speculative", block_size=1)
    result = nemotron.generate([3, 4, 5], strategy=one, max_new_tokens=12)
    assert (
        result.token_ids == nemotron.generate([3, 4, 5], strategy="ar", max_new_tokens=12).token_ids
    )
    assert result.stats.num_drafted == 0


def test_a_threshold_that_nothing_reaches_commits_the_best_slot(llada):
    never = Strategy.preset("fast-dllm", threshold=1.1, cache="none", block_size=6)
    result = llada.generate([3, 4], strategy=never, max_new_tokens=12, ignore_eos=True)
    assert result.stats.num_forwards == 12
