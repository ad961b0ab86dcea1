"""One decode step: what goes into the pass, what is committed, what the record says."""

from __future__ import annotations

import pytest
import torch
from fakes import (
    RandomTarget,
    ScriptedTarget,
    always_right,
    always_wrong,
    make_engine,
    sometimes_wrong,
)

from hybrid import registry
from hybrid.decode.loop import prefill
from hybrid.decode.step import decode_step
from hybrid.params import SamplingParams
from hybrid.types import Mode, Source

PROMPT = [9]
ANSWER = [11, 12, 13, 14, 15, 16, 17, 18]
LONG = SamplingParams(max_new_tokens=32)


def started(drafter, params=LONG, prompts=(PROMPT,), target=None, **kwargs):
    """An engine whose rows are prefilled."""
    target = target or ScriptedTarget(ANSWER, 1, vocab_size=64, eos_token_ids=(60,))
    engine, rows = make_engine(target, drafter, prompts, params, **kwargs)
    for row in rows:
        prefill(engine, row)
    engine.rows = list(rows)
    return engine, rows


def test_prefill_commits_the_first_token():
    engine, (row,) = make_engine(
        ScriptedTarget(ANSWER, 1, vocab_size=64), registry.load("drafter", "none")(), [PROMPT], LONG
    )
    record, taps = prefill(engine, row)
    assert record.mode == Mode.PREFILL
    assert record.rows[0].tokens == (11,)
    assert record.rows[0].sources == (Source.AR,)
    assert record.width == record.num_verify_forwards == 1
    assert row.tokens == [9, 11]
    assert engine.cache.lengths == [1]
    assert taps == {}


def test_a_right_draft_is_committed_with_a_bonus():
    engine, (row,) = started(always_right([PROMPT + ANSWER], 3), num_draft_tokens=3)
    record = decode_step(engine)
    (step,) = record.rows
    assert step.tokens == (12, 13, 14, 15)
    assert step.sources == (Source.DRAFT_VERIFIED,) * 3 + (Source.BONUS,)
    assert (step.num_drafted, step.num_accepted, step.drafted) == (3, 3, (12, 13, 14))
    assert (record.mode, record.width) == (Mode.SPECULATIVE, 4)
    assert row.tokens == [9, 11, 12, 13, 14, 15]
    # The cache holds the true tokens, all but the new anchor.
    assert engine.cache.lengths == [row.cached_len]
    assert engine.cache.tokens[0][: row.cached_len] == row.tokens[:-1]


def test_a_wrong_draft_costs_nothing_but_itself():
    engine, (row,) = started(always_wrong([PROMPT + ANSWER], 3), num_draft_tokens=3)
    (step,) = decode_step(engine).rows
    assert step.tokens == (12,)
    assert step.sources == (Source.CORRECTION,)
    assert (step.num_drafted, step.num_accepted, step.drafted) == (3, 0, (13, 14, 15))
    assert engine.cache.lengths == [row.cached_len] == [2]


def test_without_a_draft_the_step_is_ar():
    engine, (row,) = started(registry.load("drafter", "none")(), num_draft_tokens=0)
    record = decode_step(engine)
    assert record.mode == Mode.AR
    assert record.width == 1
    assert record.rows[0].sources == (Source.AR,)
    assert record.rows[0].num_drafted == 0
    assert row.tokens == [9, 11, 12]


@pytest.mark.parametrize("at", range(1, 6))
def test_nothing_after_eos_is_committed(at):
    answer = [*ANSWER[:at], 60, *ANSWER[at:]]
    target = ScriptedTarget(answer, 1, vocab_size=64, eos_token_ids=(60,))
    drafter = always_right([PROMPT + answer], 6)
    engine, (row,) = started(drafter, target=target, num_draft_tokens=6)
    (step,) = decode_step(engine).rows
    assert row.tokens == PROMPT + answer[: at + 1]
    assert step.finish_reason == row.finish_reason == "stop"
    assert len(step.sources) == len(step.tokens) == at
    assert engine.rows == []


@pytest.mark.parametrize("limit", [2, 3, 4])
def test_a_draft_is_cut_to_what_can_still_be_committed(limit):
    params = SamplingParams(max_new_tokens=limit)
    target = ScriptedTarget(ANSWER, 1, vocab_size=64, max_seq_len=1 + limit)
    engine, (row,) = started(
        always_right([PROMPT + ANSWER], 6), params, target=target, num_draft_tokens=6
    )
    record = decode_step(engine)
    assert record.width == limit - 1  # never a position that no answer can reach
    assert row.tokens == PROMPT + ANSWER[:limit]
    assert row.finish_reason == "length"


def test_rows_have_their_own_acceptance():
    sequences = [[1, *ANSWER], [2, *ANSWER], [3, *ANSWER]]
    right, wrong = always_right(sequences, 4), always_wrong(sequences, 4)

    class Mixed(type(right)):
        def guess(self, row, count):
            return {0: right.guess, 1: wrong.guess, 2: lambda row, count: []}[row.row](row, count)

    prompts = [s[:1] for s in sequences]
    engine, rows = started(Mixed(sequences, 4), prompts=prompts)
    record = decode_step(engine)
    assert [len(step.tokens) for step in record.rows] == [5, 1, 1]
    assert [step.num_drafted for step in record.rows] == [4, 4, 0]
    assert [step.sources[-1] for step in record.rows] == [
        Source.BONUS,
        Source.CORRECTION,
        Source.AR,
    ]
    for row in rows:
        length = engine.cache.lengths[row.row]
        assert engine.cache.tokens[row.row][:length] == row.tokens[:-1]


def test_a_row_that_ends_leaves_the_step():
    drafter = always_right([], 4)
    engine, rows = started(drafter, prompts=[[1], [2]])
    engine.rules[0].push = lambda token: "stop"
    decode_step(engine)
    assert engine.rows == [rows[1]]
    record = decode_step(engine)
    assert [step.index for step in record.rows] == [1]
    assert [r.finish_reason for r in rows] == ["stop", None]


def test_the_drafter_sees_the_anchors_predecessor():
    """`state.hidden` is the tap of the last cached token, in the order of the active rows."""
    drafter = sometimes_wrong([[1, *ANSWER], [2, *ANSWER]], 4)
    drafter.taps = (0,)
    seen = []
    plain = drafter.draft

    def draft(state, plan):
        seen.append(
            [
                (row.cached_len - 1, int(h))
                for row, h in zip(state.rows, state.hidden[0], strict=True)
            ]
        )
        return plain(state, plan)

    drafter.draft = draft
    engine, rows = make_engine(
        ScriptedTarget(ANSWER * 3, 1, vocab_size=64, eos_token_ids=()), drafter, [[1], [2]], LONG
    )
    hidden = [prefill(engine, row)[1][0] for row in rows]
    engine.rows, engine.hidden = list(rows), {0: torch.cat(hidden)}
    for _ in range(4):
        decode_step(engine)
    assert len(seen) == 4
    # The fake's hidden state of a token is its position.
    assert all(position == tap for step in seen for position, tap in step)


def test_observe_gets_the_record_and_history_keeps_it():
    drafter = always_right([PROMPT + ANSWER], 2)
    engine, _ = started(drafter, num_draft_tokens=2)
    record = decode_step(engine)
    assert drafter.observed == [record]
    assert engine.history[-1] is record
    assert record.seconds >= record.forward_seconds >= 0
    assert record.draft_seconds >= 0


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_sampled_steps_use_the_rows_own_stream(verifier):
    params = SamplingParams(temperature=1.0, seed=3, max_new_tokens=32)

    def tokens(prompts):
        target = RandomTarget(16)
        engine, rows = started(always_right([], 3), params, prompts, target, verifier=verifier)
        for _ in range(3):
            decode_step(engine)
        return [row.tokens for row in rows]

    (alone,) = tokens([[5]])
    assert tokens([[5], [6]])[0] == alone
    assert tokens([[6], [5]])[1] == alone
