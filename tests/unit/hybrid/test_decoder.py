"""The facade: text, stopping, streams, cancelling, and its parts."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from fakes import (
    BYTE_VOCAB,
    BYTES,
    EOS,
    FakeTarget,
    Oracle,
    RandomTarget,
    ScriptedTarget,
    SkewedDrafter,
    decoder,
    events_text,
    random_adapter,
    random_prompts,
    text_decoder,
    tiny_backbone,
)

from hybrid import HybridDecoder, SamplingParams
from hybrid.decode.reference import reference_logits
from hybrid.errors import ConfigError
from hybrid.strategy import VERIFIED
from hybrid.types import Mode, Source

STRATEGIES = tuple(name for name in VERIFIED if name != "dflash")
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
CHAT = [{"role": "user", "content": "hi"}]


def oracle_decoder(answer, count=5, wrong=lambda index: index % 4 == 0, **kwargs):
    """A decoder whose drafter is mostly right about `answer`."""
    ids = BYTES.encode(answer) if isinstance(answer, str) else list(answer)
    drafter = Oracle([[*BYTES.encode("?"), *ids, EOS]], count, wrong)
    drafter.vocab_size = BYTE_VOCAB
    return text_decoder(answer, drafter, **kwargs)


# Results


@each_strategy
def test_text_ends_at_eos_and_leaves_it_out(strategy):
    result = oracle_decoder("hello wörld").generate("?", strategy=strategy)
    assert result.text == "hello wörld"
    assert result.token_ids == (*BYTES.encode("hello wörld"), EOS)
    assert result.finish_reason == "stop"
    assert len(result.sources) == len(result.token_ids)
    assert result.logprobs is result.top_logprobs is None
    assert result.stats.num_new_tokens == len(result.token_ids)
    assert result.stats.num_prompt_tokens == 1


def test_strategies_differ_in_forwards_only():
    model = oracle_decoder("abcdefghijklmnop", 4, lambda index: index == 8)
    ar, speculative = (model.generate("?", strategy=s) for s in ("ar", "speculative"))
    assert ar.token_ids == speculative.token_ids
    assert ar.stats.acceptance_length == ar.stats.tokens_per_forward == 1
    assert ar.stats.num_drafted == 0
    assert speculative.stats.num_verify_forwards < ar.stats.num_verify_forwards / 2
    assert set(ar.sources) == {Source.AR}
    assert {Source.DRAFT_VERIFIED, Source.CORRECTION, Source.BONUS} <= set(speculative.sources)


@each_strategy
@pytest.mark.parametrize("limit", [1, 2, 5, 6, 7])
def test_exactly_max_new_tokens(strategy, limit):
    result = oracle_decoder("abcdefghij").generate("?", strategy=strategy, max_new_tokens=limit)
    assert result.text == "abcdefghij"[:limit]
    assert len(result.token_ids) == limit
    assert result.finish_reason == "length"


def test_one_prompt_gives_a_result_and_several_a_list():
    model = text_decoder("ok")
    assert model.generate("?").text == "ok"
    assert model.generate(BYTES.encode("?")).text == "ok"
    results = model.generate(["?", BYTES.encode("!")])
    assert [r.text for r in results] == ["ok", "ok"]
    assert [r.text for r in model.generate(["?"])] == ["ok"]


def test_chat_messages_go_through_the_template():
    prompt = BYTES.chat(CHAT)
    target = ScriptedTarget([*BYTES.encode("yes"), EOS], len(prompt))
    model = HybridDecoder(target, BYTES)
    assert model.generate(CHAT).text == "yes"
    assert [r.text for r in model.generate([CHAT, CHAT])] == ["yes", "yes"]


def test_without_a_tokenizer_there_are_only_ids():
    result = decoder(ScriptedTarget([5, 6, 7], 1)).generate([9], max_new_tokens=2)
    assert result.text == ""
    assert result.token_ids == (5, 6)


def test_keywords_go_on_top_of_params():
    model = text_decoder("abcdef")
    params = SamplingParams(max_new_tokens=2)
    assert model.generate("?", params).text == "ab"
    assert model.generate("?", params, max_new_tokens=3).text == "abc"


# Stopping


@each_strategy
def test_stop_strings_across_token_borders(strategy):
    model = oracle_decoder("one two</s>three")
    result = model.generate("?", strategy=strategy, stop="</s>")
    assert (result.text, result.finish_reason) == ("one two", "stop")
    # The token that completes it is the last one: nothing after it is emitted.
    assert result.token_ids == tuple(BYTES.encode("one two</s>"))


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (("two", "one"), ""),
        (("e two", "two"), "on"),
        (("zzz",), "one two three"),
        ("é", "one two three"),
    ],
)
def test_several_stop_strings(stop, expected):
    assert oracle_decoder("one two three").generate("?", stop=stop).text == expected


def test_a_stop_string_may_be_part_of_a_character_sequence():
    assert oracle_decoder("日本語です").generate("?", stop="語").text == "日本"


@each_strategy
def test_stop_ids(strategy):
    letter = BYTES.encode("c")[0]
    result = oracle_decoder("abcdef").generate("?", strategy=strategy, stop_token_ids=[letter])
    assert (result.text, result.finish_reason) == ("ab", "stop")
    assert result.token_ids[-1] == letter


def test_several_eos_ids():
    for end in ("b", "d"):
        ids = tuple(BYTES.encode(end)) + (EOS,)
        assert oracle_decoder("abcd", eos_token_ids=ids).generate("?").text == "abcd".split(end)[0]


@each_strategy
def test_ignore_eos(strategy):
    answer = [*BYTES.encode("ab"), EOS, *BYTES.encode("cd")]
    model = oracle_decoder(answer)
    result = model.generate("?", strategy=strategy, ignore_eos=True, max_new_tokens=5)
    assert result.token_ids == tuple(answer)
    assert result.text == "abcd"  # special tokens have no text
    assert result.finish_reason == "length"
    assert model.generate("?", strategy=strategy).text == "ab"


@each_strategy
@pytest.mark.parametrize("least", [1, 3, 4, 7])
def test_min_new_tokens_forbids_eos_and_stop_ids(strategy, least):
    letter = BYTES.encode("c")[0]

    def law(tokens):
        """EOS is best, then "c", then "a"."""
        logits = [0.0] * BYTE_VOCAB
        logits[EOS], logits[letter], logits[BYTES.encode("a")[0]] = 5.0, 4.0, 3.0
        return logits

    model = HybridDecoder(FakeTarget(law, BYTE_VOCAB, eos_token_ids=(EOS,)), BYTES)
    result = model.generate(
        "?", strategy=strategy, min_new_tokens=least, stop_token_ids=[letter], max_new_tokens=9
    )
    assert result.text == "a" * least
    assert result.token_ids[-1] == EOS


# Log-probabilities


@each_strategy
@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 0.8, "top_k": 5, "seed": 3}], ids=["greedy", "sampled"]
)
def test_logprobs_are_those_of_the_unmodified_target(strategy, fields):
    backbone = tiny_backbone("llama")
    (prompt,) = random_prompts(6)
    model = decoder(backbone, "self-diffusion")
    result = model.generate(
        prompt, strategy=strategy, logprobs=3, max_new_tokens=9, repetition_penalty=1.1, **fields
    )
    logits = reference_logits(backbone, [*prompt, *result.token_ids])[len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits.double(), dim=-1)
    assert len(result.logprobs) == len(result.top_logprobs) == 9
    for at, token in enumerate(result.token_ids):
        assert result.logprobs[at] == pytest.approx(float(expected[at, token]), abs=1e-4)
        best = expected[at].topk(3)
        assert list(result.top_logprobs[at]) == best.indices.tolist()
        assert list(result.top_logprobs[at].values()) == pytest.approx(
            best.values.tolist(), abs=1e-4
        )


def test_logprobs_without_alternatives():
    result = text_decoder("ab").generate("?", logprobs=0)
    assert len(result.logprobs) == 3
    assert result.top_logprobs == ({}, {}, {})


# Streams


@each_strategy
@pytest.mark.parametrize(
    ("answer", "fields"),
    [
        ("plain text", {}),
        ("日本🙂 wörld", {}),
        ("cut 🙂", {"max_new_tokens": 6}),
        ("half</s", {"stop": "</s>"}),
        ("some</s>more", {"stop": "</s>"}),
        ("", {}),
    ],
)
def test_a_stream_adds_up_to_the_result(strategy, answer, fields):
    model = oracle_decoder(answer)
    text, streamed = events_text(model.stream("?", strategy=strategy, **fields))
    result = model.generate("?", strategy=strategy, **fields)
    assert text == streamed.text == result.text
    assert streamed.token_ids == result.token_ids
    assert streamed.finish_reason == result.finish_reason
    if strategy != "hybrid":  # which learns from call to call
        assert streamed.sources == result.sources


def test_events_carry_records_and_colours():
    events = list(oracle_decoder("abcdefgh").stream("?"))
    assert [e.record.mode for e in events][:2] == [Mode.PREFILL, Mode.SPECULATIVE]
    assert all(e.result is None for e in events[:-1])
    tokens = [t for e in events for t in e.record.rows[0].tokens]
    assert tuple(tokens) == events[-1].result.token_ids
    for event in events:
        told = dict(zip(event.record.rows[0].sources, event.record.rows[0].tokens, strict=False))
        assert all(source in told for _, source in event.pieces)


def test_a_stream_takes_one_prompt_and_complains_at_once():
    model = text_decoder("ok")
    with pytest.raises(ConfigError, match="got a list of prompts, expected one. Use generate"):
        model.stream(["a", "b"])
    with pytest.raises(ConfigError, match="temperature"):
        model.stream("?", temperature=-1)


# Cancelling


class Noted(ScriptedTarget):
    """A target whose caches can be watched."""

    def new_cache(self, batch, max_len):
        cache = super().new_cache(batch, max_len)
        self.watch = weakref.ref(cache)
        return self.caches.pop()


@pytest.mark.parametrize("num_events", [0, 1, 2, 4])
def test_closing_a_stream_frees_its_cache_and_nothing_else(num_events):
    answer = BYTES.encode("a long answer")
    target = Noted([*answer, EOS], 1)
    drafter = Oracle([[*BYTES.encode("?"), *answer]], 3)
    drafter.vocab_size = BYTE_VOCAB
    model = HybridDecoder(target, BYTES, drafter=drafter)
    fresh = model.generate("?")
    stream = model.stream("?")
    for _ in range(num_events):
        next(stream)
    cache = target.watch()
    stream.close()
    assert cache.lengths == [0]
    assert next(stream, None) is None
    del stream, cache
    gc.collect()
    assert target.watch() is None
    again = model.generate("?")
    assert (again.text, again.token_ids) == (fresh.text, fresh.token_ids)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("device lost")])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_after_an_error_the_decoder_works_again(error, at):
    target = RandomTarget(16)
    model = decoder(target)
    fresh = model.generate([1, 2], max_new_tokens=8).token_ids
    target.fail_at = {target.num_forwards + at: error}
    with pytest.raises(type(error)):
        model.generate([1, 2], max_new_tokens=8)
    assert target.caches[-1].lengths == [0]
    target.fail_at = {target.num_forwards + at: error}
    with pytest.raises(type(error)):
        list(model.stream([1, 2], max_new_tokens=8))
    assert target.caches[-1].lengths == [0]
    assert model.generate([1, 2], max_new_tokens=8).token_ids == fresh


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 4}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", ["ngram", "self-diffusion", "skewed"])
def test_interleaved_streams_do_not_meet(drafter, fields):
    made = SkewedDrafter(64) if drafter == "skewed" else drafter
    model = decoder(tiny_backbone("llama"), made)
    prompts = random_prompts(5, 8, 3)
    alone = [model.generate(p, max_new_tokens=10, **fields).token_ids for p in prompts]
    streams = [model.stream(p, max_new_tokens=10, **fields) for p in prompts]
    results = [None] * len(prompts)
    while not all(results):
        for index, stream in enumerate(streams):
            event = next(stream, None)
            if event is not None and event.result is not None:
                results[index] = event.result
    assert [r.token_ids for r in results] == alone


# Parts


def test_names_of_the_parts():
    assert decoder(RandomTarget(16)).drafter_name == "ngram"
    assert decoder(RandomTarget(16), SkewedDrafter(16)).drafter_name == "skewed"
    assert decoder(RandomTarget(16)).verifier_name == "auto"
    backbone = tiny_backbone("llama")
    with_adapter = HybridDecoder(backbone, adapter=random_adapter(backbone))
    assert with_adapter.drafter_name == "combined"


def test_a_drafter_is_reset_for_each_call_and_k_is_its_own_at_most():
    drafter = Oracle([], 3)
    with pytest.raises(ConfigError, match="num_draft_tokens: got 9, expected at most 3"):
        decoder(RandomTarget(16), drafter, num_draft_tokens=9)
    model = decoder(RandomTarget(16), drafter)
    for calls in (1, 2):
        model.generate([1], max_new_tokens=6)
        assert drafter.num_resets == calls
    assert max(row.num_drafted for r in drafter.observed for row in r.rows) == 3


def test_a_target_without_rollback_decodes_token_by_token():
    target = ScriptedTarget([5, 6, 5, 6, 5, 6], 1)
    target.supports_rollback = False
    model = decoder(target)
    with pytest.warns(RuntimeWarning, match="cannot be rolled back"):
        result = model.generate([9], max_new_tokens=5)
    assert result.token_ids == (5, 6, 5, 6, 5)
    assert result.stats.num_drafted == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate([9], strategy="ar", max_new_tokens=2)


def test_planned_memory_adds_up_and_matches_the_cache():
    backbone = tiny_backbone("llama")
    model = decoder(backbone, "self-diffusion")
    plan = model.plan_memory(100, batch=2)
    assert plan["total"] == sum(v for k, v in plan.items() if k != "total")
    width = 1 + model.adapter.config.num_draft_tokens
    assert plan["kv_cache"] == backbone.new_cache(2, 100 + width).nbytes
    assert plan["adapter"] == model.adapter.nbytes > 0
    assert plan["weights"] >= backbone.embedding.numel() * 4
    assert model.plan_memory()["kv_cache"] > model.plan_memory(10)["kv_cache"]
    for bad in ((0, 1), (10, 0)):
        with pytest.raises(ConfigError, match="expected at least 1"):
            model.plan_memory(*bad)


def test_the_cache_is_as_large_as_the_call_can_need():
    target = RandomTarget(16)
    decoder(target, Oracle([], 5)).generate([[1, 2, 3], [4]], max_new_tokens=10)
    (cache,) = target.caches
    assert len(cache.tokens) == 2
    assert 3 + 10 <= cache.capacity <= 3 + 10 + 1 + 5
