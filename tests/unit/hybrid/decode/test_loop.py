"""The loop: prefill in chunks, cancelling, errors, and the parts afterwards."""

from __future__ import annotations

import pytest
import torch
from fakes import (
    EOS,
    RandomTarget,
    ScriptedTarget,
    always_right,
    make_engine,
    random_prompts,
    tiny_backbone,
)

from hybrid import registry
from hybrid.decode.loop import run
from hybrid.decode.reference import reference_greedy, reference_logits
from hybrid.params import SamplingParams
from hybrid.types import Mode

PARAMS = SamplingParams(max_new_tokens=8)


def none():
    return registry.load("drafter", "none")()


def finish(engine, rows):
    records = list(run(engine, rows))
    return records, [row.tokens[row.num_prompt_tokens :] for row in rows]


def test_prefills_come_first_then_steps_of_all_rows():
    engine, rows = make_engine(RandomTarget(16), none(), [[1], [2, 3]], PARAMS, num_draft_tokens=0)
    records, answers = finish(engine, rows)
    assert [r.mode for r in records] == [Mode.PREFILL] * 2 + [Mode.AR] * 7
    assert [[s.index for s in r.rows] for r in records] == [[0], [1]] + [[0, 1]] * 7
    assert [len(a) for a in answers] == [8, 8]
    assert engine.history == records
    for row, answer in enumerate(answers):
        told = [t for r in records for s in r.rows if s.index == row for t in s.tokens]
        assert told == answer


@pytest.mark.parametrize("length", [1, 4, 5, 8, 9, 13])
def test_a_prompt_is_prefilled_in_chunks(monkeypatch, length):
    backbone = tiny_backbone("mistral-window")
    monkeypatch.setattr(backbone, "prefill_chunk", 4)
    (prompt,) = random_prompts(length)
    engine, rows = make_engine(backbone, none(), [prompt], PARAMS, num_draft_tokens=0)
    records, (answer,) = finish(engine, rows)
    assert records[0].num_verify_forwards == -(-length // 4)
    assert records[0].width == length
    assert answer == reference_greedy(backbone, prompt, 8)


def test_a_row_may_end_with_its_first_token():
    target = ScriptedTarget([EOS], 1)
    engine, rows = make_engine(target, none(), [[5], [6]], PARAMS)
    records, answers = finish(engine, rows)
    assert answers == [[EOS], [EOS]]
    assert [r.mode for r in records] == [Mode.PREFILL] * 2
    assert [r.rows[0].finish_reason for r in records] == ["stop", "stop"]


@pytest.mark.parametrize("num_events", [0, 1, 2, 3, 5])
def test_closing_frees_the_rows(num_events):
    engine, rows = make_engine(RandomTarget(16), always_right([], 3), [[1], [2]], PARAMS)
    steps = run(engine, rows)
    for _ in range(num_events):
        next(steps)
    steps.close()
    assert engine.cache.lengths == [0, 0]
    assert engine.rows == []
    assert engine.hidden == {}
    assert all(row.finish_reason is None for row in rows)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("device lost")])
@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_an_error_frees_the_rows_and_the_parts_work_again(at, error):
    target = RandomTarget(16, fail_at={at: error})
    engine, rows = make_engine(target, always_right([], 3), [[1], [2]], PARAMS)
    with pytest.raises(type(error)):
        list(run(engine, rows))
    assert engine.cache.lengths == [0, 0]
    assert engine.rows == []
    again, rows = make_engine(target, engine.drafter, [[1], [2]], PARAMS)
    again.cache = engine.cache
    _, answers = finish(again, rows)
    fresh, rows = make_engine(RandomTarget(16), none(), [[1], [2]], PARAMS)
    assert answers == finish(fresh, rows)[1]


def test_the_cache_is_allocated_once_and_never_moves():
    backbone = tiny_backbone("llama")
    engine, rows = make_engine(
        backbone, registry.load("drafter", "ngram")(), random_prompts(5, 9), PARAMS
    )
    address = engine.cache.data.data_ptr()
    for _ in run(engine, rows):
        assert engine.cache.data.data_ptr() == address


def test_reference_stops_at_eos_and_recomputes_everything():
    target = ScriptedTarget([7, 8, EOS, 9], 2)
    assert reference_greedy(target, [1, 2], 10, (EOS,)) == [7, 8, EOS]
    assert reference_greedy(target, [1, 2], 2, (EOS,)) == [7, 8]
    assert reference_greedy(target, [1, 2], 4) == [7, 8, EOS, 9]
    assert all(cache.lengths == [0] for cache in target.caches)


def test_reference_logits_are_those_of_an_incremental_pass():
    backbone = tiny_backbone("qwen3")
    (tokens,) = random_prompts(7)
    logits = reference_logits(backbone, tokens)
    assert logits.shape == (7, backbone.vocab_size)
    torch.testing.assert_close(logits[:4], reference_logits(backbone, tokens[:4]))
