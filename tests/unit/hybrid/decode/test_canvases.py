"""A model that brings its own loop: limits, EOS and records are those of the other loops."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from hybrid.decode.canvases import decode_canvases
from hybrid.decode.stopping import StopRule
from hybrid.params import SamplingParams
from hybrid.streams import RandomStream
from hybrid.types import Mode, SequenceState, StepRecord


@dataclass(frozen=True)
class Canvas:
    tokens: tuple[int, ...]
    num_steps: int


class Counting:
    """Says prompt[0], prompt[0] + 1, ... in canvases of four, the n-th after n passes."""

    def __init__(self) -> None:
        self.seeds: list[int] = []
        self.num_closed = 0

    def canvases(
        self, prompt: Sequence[int], settings: Any, seed: int
    ) -> Generator[Canvas, None, None]:
        self.seeds.append(seed)
        assert settings == "settings"
        start, num_steps = prompt[0], 0
        try:
            while True:
                num_steps += 1
                yield Canvas(tuple(range(start, start + 4)), num_steps)
                start += 4
        finally:
            self.num_closed += 1


def run(
    model: Counting, prompts: list[list[int]], eos: tuple[int, ...] = (), **fields: Any
) -> tuple[list[SequenceState], list[StepRecord]]:
    params = SamplingParams(**fields)
    rows = []
    for i, prompt in enumerate(prompts):
        stream = RandomStream(70 + i)
        state = SequenceState(i, list(prompt), len(prompt), params, stream)
        rows.append((state, StopRule(params, eos)))
    return [state for state, _ in rows], list(decode_canvases(model, rows, "settings"))


@pytest.mark.parametrize("limit", [1, 4, 6])
def test_exactly_as_many_tokens_as_asked_for(limit: int) -> None:
    model = Counting()
    (state,), records = run(model, [[10]], max_new_tokens=limit)
    assert state.tokens == [10, *range(10, 10 + limit)]
    assert state.finish_reason == "length"
    assert len(records) == -(-limit // 4)
    assert [r.num_denoise_forwards for r in records] == list(range(1, len(records) + 1))
    assert {(r.mode, r.num_verify_forwards, r.width) for r in records} == {(Mode.DIFFUSION, 1, 4)}
    assert model.seeds == [70], "the stream of the request"
    assert model.num_closed == 1


def test_rows_end_by_themselves_and_take_turns() -> None:
    model = Counting()
    states, records = run(model, [[10], [30]], eos=(16,), max_new_tokens=12)
    assert states[0].tokens == [10, *range(10, 17)]
    assert states[0].finish_reason == "stop"
    assert states[1].tokens == [30, *range(30, 42)]
    assert [r.rows[0].index for r in records] == [0, 1, 0, 1, 1]
    assert [t for r in records for s in r.rows for t in s.tokens if s.index == 0] == [
        *range(10, 17)
    ]
    assert records[2].rows[0].finish_reason == "stop"
    assert model.seeds == [70, 71]


def test_closing_early_closes_the_model_too() -> None:
    model, params = Counting(), SamplingParams(max_new_tokens=50)
    state = SequenceState(0, [3], 1, params, RandomStream(0))
    steps = decode_canvases(model, [(state, StopRule(params, ()))], "settings")
    next(steps)
    steps.close()
    assert model.num_closed == 1
    assert state.tokens == [3, 3, 4, 5, 6]
