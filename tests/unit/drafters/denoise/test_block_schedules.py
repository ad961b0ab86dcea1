"""Schedules and rules of block-causal systems by hand: quotas, thresholds met exactly, borders."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid.decode.canvas import Block, Canvas
from hybrid.decode.policies import Denoiser, UnmaskRule
from hybrid.drafters.denoise.block_grid import Grid
from hybrid.drafters.denoise.block_presets import (
    D2F,
    SDAR,
    FastDLLMv2,
    LLaDA2,
    LLaDA21,
    Nemotron,
)
from hybrid.drafters.denoise.block_rules import Rewrite
from hybrid.drafters.denoise.block_schedules import (
    BlockWindow,
    BridgedBlocks,
    RewrittenBlocks,
    SteppedBlocks,
)
from hybrid.types import Context

MASK = 9


def canvas_of(schedule: Any, num_prompt: int) -> Canvas:
    """Return a canvas whose prompt holds the mask token."""
    return Canvas([MASK] * num_prompt, schedule.length, MASK)


def put(canvas: Canvas, *positions: int, token: int = 1) -> None:
    canvas.commit(torch.tensor(positions), torch.tensor([token] * len(positions)))


@pytest.mark.parametrize(("num_prompt", "length"), [(8, 12), (9, 12), (10, 12), (11, 16), (12, 16)])
def test_the_canvas_ends_where_a_block_ends(num_prompt: int, length: int) -> None:
    schedule = SteppedBlocks(Grid(4), num_prompt, 2, 4)
    assert schedule.length == length
    (block,) = schedule.open(canvas_of(schedule, num_prompt))
    assert (block.start, block.end) == (num_prompt // 4 * 4, num_prompt // 4 * 4 + 4)
    assert BlockWindow(Grid(4, num_prompt), num_prompt, 2, 0.5, 0.5).length == num_prompt + 4


def test_quotas_are_shares_of_a_whole_block_and_start_anew_with_each() -> None:
    schedule = SteppedBlocks(Grid(8), 5, 14, steps=3)
    canvas = canvas_of(schedule, 5)
    assert schedule.open(canvas) == (Block(0, 8, 3),)
    assert schedule.open(canvas) == (Block(0, 8, 3),)  # nothing was committed: not a step
    put(canvas, 6)
    assert schedule.open(canvas) == (Block(0, 8, 3),)
    put(canvas, 5)
    assert schedule.open(canvas) == (Block(0, 8, 2),)
    assert schedule.stable_end(canvas) == 7
    put(canvas, 7)
    assert schedule.open(canvas) == (Block(8, 16, 3),)
    put(canvas, *range(8, 16))
    assert schedule.open(canvas) == (Block(16, 24, 3),)
    put(canvas, 16, 17, 18)
    assert schedule.open(canvas) == ()  # all that was asked for; five slots are still masked
    assert canvas.num_masked(0, 24) == 5


def test_more_steps_than_slots_are_one_slot_each() -> None:
    schedule = SteppedBlocks(Grid(2), 2, 2, steps=5)
    canvas = canvas_of(schedule, 2)
    assert schedule.open(canvas) == (Block(2, 4, 1),)
    put(canvas, 3)
    assert schedule.open(canvas) == (Block(2, 4, 1),)


def test_a_block_joins_when_the_last_is_exactly_far_enough() -> None:
    schedule = BlockWindow(Grid(4, origin=3), 3, 12, add=0.5, activate=0.75)
    canvas = canvas_of(schedule, 3)
    assert schedule.open(canvas) == [Block(3, 7, 1)]  # behind a prompt it must make progress
    put(canvas, 6)
    assert schedule.open(canvas) == [Block(3, 7, 1)]
    put(canvas, 5)
    assert schedule.open(canvas) == [Block(3, 7, 1), Block(7, 11, 0)]
    put(canvas, 3, 7, 8, 9, 10)
    # A block in the middle may be finished first, and need not be worked on.
    assert schedule.open(canvas) == [Block(3, 7, 1), Block(11, 15, 1)]
    assert schedule.stable_end(canvas) == 4
    put(canvas, 4)
    assert schedule.open(canvas) == [Block(11, 15, 1)]
    assert schedule.stable_end(canvas) == 11
    put(canvas, 11, 12, 13, 14)
    assert schedule.open(canvas) == []


def test_one_block_joins_per_pass() -> None:
    schedule = BlockWindow(Grid(2, origin=1), 1, 6, add=0.0, activate=1.0)
    canvas = canvas_of(schedule, 1)
    assert [len(schedule.open(canvas)) for _ in range(4)] == [1, 2, 3, 3]
    assert [block.quota for block in schedule.open(canvas)] == [1, 0, 0]


def test_bridged_blocks_begin_with_their_first_slot() -> None:
    schedule = BridgedBlocks(Grid(4), 4, 7, sub_block_size=2)
    canvas = canvas_of(schedule, 4)
    seen = []
    while blocks := schedule.open(canvas):
        (block,) = blocks
        seen.append((block.start, block.end, block.quota))
        put(canvas, canvas.first_masked)
    expected = [(4, 5, 1), (4, 6, 1), (6, 8, 1), (6, 8, 1), (8, 9, 1), (8, 10, 1), (10, 12, 1)]
    assert seen == expected
    shared = BridgedBlocks(Grid(4), 7, 1, sub_block_size=2)
    assert shared.open(canvas_of(shared, 7)) == (Block(6, 8, 1),)
    behind = BridgedBlocks(Grid(4, origin=7), 7, 1, sub_block_size=4)
    assert behind.open(canvas_of(behind, 7)) == (Block(7, 8, 1),)


def test_a_block_is_finished_by_a_pass_that_changes_nothing() -> None:
    schedule = RewrittenBlocks(Grid(4), 6, 6, 1, max_post_steps=16)
    canvas = canvas_of(schedule, 6)
    assert schedule.open(canvas) == (Block(4, 8, 1),)
    put(canvas, 6, 7)
    assert schedule.stable_end(canvas) == 4
    assert schedule.open(canvas) == (Block(4, 8, 1),)
    put(canvas, 7, token=2)
    assert schedule.stable_end(canvas) == 4
    assert schedule.open(canvas) == (Block(4, 8, 1),)
    assert schedule.stable_end(canvas) == 8
    assert schedule.open(canvas) == (Block(8, 12, 1),)
    assert schedule.stable_end(canvas) == 8
    put(canvas, 8, 9, 10, 11)
    schedule.open(canvas)
    assert schedule.stable_end(canvas) == 12
    assert schedule.open(canvas) == ()


@pytest.mark.parametrize("most", [0, 1, 2])
def test_passes_without_masks_are_limited(most: int) -> None:
    schedule = RewrittenBlocks(Grid(4), 4, 4, 1, max_post_steps=most)
    canvas = canvas_of(schedule, 4)
    passes = 0
    while schedule.open(canvas):
        passes += 1
        put(canvas, 4, 5, 6, 7, token=passes)  # every pass changes something
        assert schedule.stable_end(canvas) == (8 if passes == most + 1 else 4)
    assert passes == 1 + most


def slots_of(confidence: list[float], masked: list[bool], current: list[int]) -> Any:
    """Return slots that predict token 1 with exactly these probabilities."""
    return SimpleNamespace(
        positions=torch.arange(len(confidence)),
        tokens=torch.ones(len(confidence), dtype=torch.long),
        confidence=torch.tensor(confidence),
        masked=torch.tensor(masked),
        current=torch.tensor(current),
    )


STRICT = [
    SDAR(threshold=0.75, steps=4, block_size=4),
    LLaDA2(threshold=0.75),
    LLaDA21(threshold=0.75),
    D2F(confidence_threshold=0.75),
    FastDLLMv2(threshold=0.75),
]


def parts_of(preset: Any) -> Denoiser:
    class Model:
        logit_shift, block_size, prefill_chunk = 1, 32, 512

    parts: Denoiser = preset.start(Model(), 1, 32)
    return parts


def rule_of(preset: Any) -> UnmaskRule:
    return parts_of(preset).rule


@pytest.mark.parametrize("preset", STRICT, ids=lambda p: type(p).__name__)
def test_a_confidence_that_equals_the_threshold_does_not_pass(preset: Any) -> None:
    slots = slots_of([0.75, 0.8, 0.75, 0.9], [True] * 4, [MASK] * 4)
    assert sorted(rule_of(preset).choose(slots, [Block(0, 4, 1)]).tolist()) == [1, 3]
    slots = slots_of([0.6, 0.75, 0.75, 0.75], [True] * 4, [MASK] * 4)
    assert rule_of(preset).choose(slots, [Block(0, 4, 1)]).tolist() == [1]


def test_nemotron_accepts_a_confidence_that_equals_the_threshold() -> None:
    slots = slots_of([0.75, 0.7, 0.75, 0.9], [True] * 4, [MASK] * 4)
    assert sorted(rule_of(Nemotron(threshold=0.75)).choose(slots, [Block(0, 4)])) == [0, 2, 3]
    assert rule_of(Nemotron(threshold=None)).choose(slots, [Block(0, 4)]).tolist() == [3]


@pytest.mark.parametrize(
    ("preset", "published"),
    [
        (SDAR(), 0.85),
        (LLaDA2(), 0.95),
        (LLaDA21(), 0.95),
        (D2F(), 0.9),
        (FastDLLMv2(), 0.9),
        (Nemotron(), 0.9),
    ],
    ids=lambda value: type(value).__name__,
)
def test_published_thresholds(preset: Any, published: float) -> None:
    confidence = [published - 0.01, published + 0.01, 0.5, published + 0.02]
    slots = slots_of(confidence, [True] * 4, [MASK] * 4)
    assert sorted(rule_of(preset).choose(slots, [Block(0, 4, 1)]).tolist()) == [1, 3]


def test_only_nemotrons_confidence_is_that_before_temperature() -> None:
    assert parts_of(Nemotron()).raw_confidence
    assert not any(parts_of(preset).raw_confidence for preset in STRICT)


def test_the_quota_takes_masked_slots_only() -> None:
    """SDAR's own code takes committed ones, too, and overwrites the prompt with them."""
    slots = slots_of([0.6, 0.99, 0.99, 0.7], [True, False, False, True], [MASK, 5, 5, MASK])
    assert sorted(rule_of(STRICT[0]).choose(slots, [Block(0, 4, 3)]).tolist()) == [0, 3]


def test_d2f_takes_nothing_unsure_from_a_block_that_need_not_progress() -> None:
    slots = slots_of([0.6, 0.7, 0.65, 0.9], [True] * 4, [MASK] * 4)
    chosen = rule_of(D2F(confidence_threshold=0.8)).choose(slots, [Block(0, 2, 1), Block(2, 4, 0)])
    assert sorted(chosen.tolist()) == [1, 3]
    chosen = rule_of(D2F(confidence_threshold=0.9)).choose(slots, [Block(0, 2, 0), Block(2, 4, 0)])
    assert chosen.tolist() == []


def test_rewriting_replaces_other_tokens_that_are_surer_than_the_threshold() -> None:
    rule = Rewrite(threshold=0.7, edit_threshold=0.75)
    confidence = [0.75, 0.8, 0.8, 0.7, 0.71]
    slots = slots_of(confidence, [False, False, False, True, True], [5, 5, 1, MASK, MASK])
    # 0 only equals the threshold, 2 holds that token already, 3 only equals that of masks.
    assert sorted(rule.choose(slots, [Block(0, 5, 1)]).tolist()) == [1, 4]
    assert sorted(rule.choose(slots, [Block(0, 5, 2)]).tolist()) == [1, 3, 4]


def test_who_can_run_what() -> None:
    class Model:
        mask_token_id, default_strategy = 1, ""

        def __init__(self, context: Context, logit_shift: int) -> None:
            self.context, self.logit_shift = context, logit_shift

    models = {
        "llada": Model(Context.BIDIRECTIONAL, 0),
        "sdar": Model(Context.BLOCK_CAUSAL, 0),
        "fast": Model(Context.BLOCK_CAUSAL, 1),
        "nemotron": Model(Context.CAUSAL, 0),
    }
    fits = {
        make.__name__: [name for name, model in models.items() if make().misfit(model) is None]
        for make in (SDAR, LLaDA2, LLaDA21, D2F, FastDLLMv2, Nemotron)
    }
    assert fits == {
        "SDAR": ["sdar", "fast"],
        "LLaDA2": ["sdar", "fast"],
        "LLaDA21": ["sdar", "fast"],
        "D2F": ["llada"],
        "FastDLLMv2": ["fast"],
        "Nemotron": ["nemotron"],
    }
