"""Block schedules: every slot belongs to one block, whatever the lengths."""

from types import SimpleNamespace

import pytest
import torch

from hybrid.decode.canvas import Canvas
from hybrid.drafters.denoise.schedules import (
    DreamSteps,
    IndependentSteps,
    SemiAutoregressive,
    quotas,
)


@pytest.mark.parametrize(
    ("masked", "steps", "expected"),
    [(8, 4, [2, 2, 2, 2]), (7, 4, [2, 2, 2, 1]), (3, 5, [1, 1, 1, 0, 0]), (5, 1, [5])],
)
def test_the_first_steps_take_the_remainder(masked, steps, expected):
    assert quotas(masked, steps) == expected


def walk(schedule, num_prompt):
    """Commit each pass's quota, leftmost first; return (start, end, committed) of each pass."""
    canvas, seen = Canvas([1] * num_prompt, schedule.length, 0), []
    while blocks := schedule.open(canvas):
        (block,) = blocks
        slots = canvas.slots(block.start, block.end)[: block.quota]
        canvas.commit(slots, torch.ones_like(slots))
        assert schedule.stable_end(canvas) == canvas.first_masked
        seen.append((block.start, block.end, len(slots)))
    assert not canvas.masked.any()
    return seen


@pytest.mark.parametrize("size", [1, 3, 4, 50])
@pytest.mark.parametrize("new", [1, 4, 10])
def test_blocks_follow_each_other_and_cover_the_answer(size, new):
    seen = walk(SemiAutoregressive(5, new, size), 5)
    starts = [start for start, _, _ in seen]
    assert starts == sorted(starts)
    assert sum(count for _, _, count in seen) == new == len(seen)
    assert {start for start, _, _ in seen} == set(range(5, 5 + new, size))
    assert max(end for _, end, _ in seen) == 5 + new


def test_steps_are_shared_by_the_blocks():
    seen = walk(SemiAutoregressive(2, 10, 5, steps=4), 2)
    assert [count for _, _, count in seen] == [3, 2, 3, 2]
    # More steps than slots cost no empty passes.
    assert len(walk(SemiAutoregressive(2, 4, 4, steps=9), 2)) == 4


def test_dream_commits_shares_of_what_is_left():
    # t = 1, 0.775, 0.55, 0.325, 0.1; shares 0.225, 0.29, 0.41, all.
    seen = walk(DreamSteps(3, 10, 4, 0.1), 3)
    assert [count for _, _, count in seen] == [2, 2, 2, 4]
    assert {(start, end) for start, end, _ in seen} == {(3, 13)}


def test_dream_runs_no_pass_for_nothing():
    seen = walk(DreamSteps(0, 2, 50, 1e-3), 0)
    assert seen == [(0, 2, 2)]  # 49 of 50 steps round down to nothing


def test_each_slot_by_itself_with_the_odds_of_the_step():
    generator, counts = torch.Generator().manual_seed(1), []
    for _ in range(400):
        steps, canvas = IndependentSteps(2, 40, 4, 0.1), Canvas([1, 1], 42, 0)
        committed = []
        while blocks := steps.open(canvas):
            targets = canvas.slots(blocks[0].start, blocks[0].end)
            noise = torch.rand(len(targets), generator=generator, dtype=torch.float64)
            index = steps.choose(SimpleNamespace(random=noise), blocks)
            canvas.commit(targets[index], torch.ones_like(index))
            committed.append(len(index))
        assert sum(committed) == 40
        assert len(committed) == 4
        counts.append(committed)
    means = torch.tensor(counts).double().mean(dim=0)
    # t = 1, 0.775, 0.55, 0.325, 0.1: a quarter of 90 % of the slots each time, then all.
    expected = torch.tensor([9.0, 9.0, 9.0, 13.0]).double()
    torch.testing.assert_close(means, expected, rtol=0, atol=0.6)
