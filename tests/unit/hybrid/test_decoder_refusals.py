"""What the facade refuses: the right exception, and a message that says what to do."""

from __future__ import annotations

import math

import pytest
from fakes import (
    BYTE_VOCAB,
    RandomTarget,
    decoder,
    text_decoder,
)

from hybrid import HybridDecoder
from hybrid.errors import CapacityError, ConfigError

CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("", "prompt: got an empty prompt, expected at least one token"),
        ([], "prompt: got an empty list"),
        ([""], "prompt: got an empty prompt"),
        (["?", ""], "prompt 1: got an empty prompt"),
        ([[]], "prompt: got an empty prompt"),
        ([3, -1], "got token id -1, expected ids from 0 to"),
        ([BYTE_VOCAB], f"got token id {BYTE_VOCAB}"),
        (["?", 3], "prompt 1: got a int"),
        ([3, "?"], "got a list holding int, str"),
        ([CHAT, "?", [1, "x"]], "prompt 2: got a list holding int, str"),
        (None, "got NoneType"),
        ({"role": "user", "content": "x"}, "got dict"),
        ([{"role": "robot", "content": "x"}], "role 'robot'"),
        ([{"role": "user"}], "content of NoneType"),
        ("half \ud800", "Unicode"),
    ],
    ids=lambda v: repr(v)[:30],
)
def test_bad_prompts(prompt, said):
    model = text_decoder("ok")
    with pytest.raises(ConfigError, match=said):
        model.generate(prompt)
    assert model.generate("?").text == "ok"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"temperature": -1}, "temperature: got -1"),
        ({"temperature": math.nan}, "temperature: got nan"),
        ({"temperature": math.inf}, "temperature: got inf"),
        ({"top_p": 0}, "top_p: got 0"),
        ({"max_new_tokens": 0}, "max_new_tokens: got 0"),
        ({"temprature": 1}, "Did you mean 'temperature'"),
        ({"max_tokens": 1}, "Did you mean 'max_new_tokens'"),
        ({"strategy": "speculativ"}, "strategy: got 'speculativ'. Did you mean 'speculative'"),
        ({"strategy": ["ar"]}, "strategy: got"),
        ({"params": {"temperature": 1}}, "params: got dict, expected SamplingParams"),
        ({"params": 0.5}, "params: got float, expected SamplingParams"),
        ({"stop_token_ids": [BYTE_VOCAB]}, f"stop_token_ids: got {BYTE_VOCAB}, expected ids below"),
        ({"stop": ""}, "stop: got an empty stop string"),
    ],
    ids=lambda v: str(v)[:30],
)
def test_bad_parameters(fields, said):
    with pytest.raises(ConfigError, match=said):
        text_decoder("ok").generate("?", **fields)


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(ConfigError, match="no tokenizer; use stop_token_ids"):
        decoder(RandomTarget(16)).generate([1], stop="x")


def test_the_context_is_a_limit_for_prompt_and_answer_together():
    model = text_decoder("abcdefgh", max_seq_len=8)
    assert len(model.generate("?", max_new_tokens=7).token_ids) == 7
    with pytest.raises(
        CapacityError, match=r"got 1 tokens and max_new_tokens 8, expected at most 8 .*most 7"
    ):
        model.generate("?", max_new_tokens=8)
    with pytest.raises(CapacityError, match=r"prompt 1: got 12 tokens .*Shorten the prompt\.$"):
        model.generate(["?", "0123456789ab"], max_new_tokens=1)


def test_more_memory_than_there_is_is_refused_before_it_is_taken(monkeypatch):
    monkeypatch.setattr("hybrid.memory.available_bytes", lambda device: 2**20)
    target = RandomTarget(16)
    target.cache_nbytes = lambda batch, length: 2**21
    with pytest.raises(
        CapacityError, match=r"KV cache for 1 x \d+ tokens needs 2 MiB, cpu has 1 MiB"
    ):
        decoder(target).generate([1])
    assert target.caches == []


@pytest.mark.parametrize("count", [0, -1, 2.5, "4", True])
def test_k_must_be_a_positive_integer(count):
    with pytest.raises(ConfigError, match="num_draft_tokens: got .* expected .*at least 1"):
        decoder(RandomTarget(16), num_draft_tokens=count)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"drafter": "ngrm"}, "Unknown drafter 'ngrm'. Did you mean 'ngram'"),
        ({"drafter": 5}, "drafter: got int, expected a name or a Drafter"),
        ({"verifier": "gredy"}, "Unknown verifier 'gredy'. Did you mean 'greedy'"),
        ({"verifier": 5}, "verifier: got int, expected a name or a Verifier"),
        ({"verifier": None}, "verifier: got NoneType, expected a name or a Verifier"),
    ],
)
def test_unknown_parts(fields, said):
    with pytest.raises(ConfigError, match=said):
        HybridDecoder(RandomTarget(16), **fields)


def test_self_diffusion_needs_an_adapter():
    with pytest.raises(ConfigError, match="does not fill masks by itself. Give the folder of"):
        HybridDecoder(RandomTarget(16), drafter="self-diffusion")


def test_the_greedy_verifier_cannot_sample():
    model = decoder(RandomTarget(16), verifier="greedy")
    assert model.generate([1], max_new_tokens=2).token_ids
    with pytest.raises(ConfigError, match="verifier 'greedy': got temperature 1.0, expected 0"):
        model.stream([1], temperature=1.0)  # at once, not at the first event
