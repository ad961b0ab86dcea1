"""What the d3LLM student sees: trajectory-guided and complementary masks, and the curricula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.errors import ConfigError
from hybrid.training.d3llm.batches import least_mask_ratio, student_batch, window_size
from hybrid.training.d3llm.config import D3LLMConfig
from hybrid.training.trajectory import Trajectory

MASK = 99


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    """Two blocks of 6, finished one after the other, 1 to 3 tokens per forward."""
    steps: list[int] = []
    step = 0
    for _ in range(2):
        order = draw(st.permutations(range(6)))
        committed = [0] * 6
        while order:
            step += 1
            count = draw(st.integers(1, 3))
            for index in order[:count]:
                committed[index] = step
            order = order[count:]
        steps += committed
    return Trajectory(tuple(range(10, 22)), tuple(steps))


def twin(
    prompt: list[int], trajectory: Trajectory, block: range, ratio: float
) -> tuple[list[int], list[int], list[bool]]:
    """Both rows of ids and row 0's mask, by asking of every position of every canvas."""
    visible: set[int] = set()
    for step in range(max(trajectory.steps) + 1):
        canvas = {i for i in block if trajectory.steps[i] <= step}
        if len(canvas) <= int((1 - ratio) * len(block)) and len(canvas) < len(block):
            visible = canvas  # the last that shows few enough
    rows: list[list[int]] = [[], []]
    for row in (0, 1):
        for index, token in enumerate(trajectory.tokens):
            if index in block:
                is_hidden = (index not in visible) == (row == 0)
            else:
                is_hidden = index >= block.stop
            rows[row].append(MASK if is_hidden else token)
    masked = [i in block and i not in visible for i in range(len(trajectory.tokens))]
    return prompt + rows[0], prompt + rows[1], [False] * len(prompt) + masked


@settings(max_examples=200, deadline=None)
@given(trajectories(), st.integers(1, 12), st.integers(0, 11), st.floats(1e-6, 1.0))
def test_masks_equal_a_two_loop_twin(
    trajectory: Trajectory, size: int, start: int, ratio: float
) -> None:
    block = range(start, min(start + size, 12))
    batch = student_batch([5, 6, 7], trajectory, block, ratio, MASK)
    first, second, masked = twin([5, 6, 7], trajectory, block, ratio)
    assert batch.input_ids.tolist() == [first, second]
    assert batch.masked[0].tolist() == masked
    assert batch.targets.tolist() == [5, 6, 7, *trajectory.tokens]


@settings(max_examples=100, deadline=None)
@given(trajectories(), st.integers(1, 12), st.integers(0, 11), st.floats(1e-6, 1.0))
def test_the_two_masks_are_disjoint_and_cover_the_block(
    trajectory: Trajectory, size: int, start: int, ratio: float
) -> None:
    block = range(start, min(start + size, 12))
    masked = student_batch([5, 6, 7], trajectory, block, ratio, MASK).masked
    assert not (masked[0] & masked[1]).any()
    positions = (masked[0] | masked[1]).nonzero()[:, 0].tolist()
    assert positions == [3 + index for index in block]
    assert masked[0].any()  # a step always has something to learn


@pytest.mark.parametrize("ratio", [1.0, 0.8, 0.5, 0.3, 0.01])
def test_a_block_of_the_trajectory_is_a_canvas_of_it(ratio: float) -> None:
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    steps = (*(order + 1).tolist(), *(order + 9).tolist())  # one token per forward
    trajectory = Trajectory(tuple(range(16)), steps)
    batch = student_batch([7], trajectory, range(8, 16), ratio, MASK)
    canvas_after = 8 + int((1 - ratio) * 8)
    assert batch.masked[0, 9:].tolist() == [step > canvas_after for step in steps[8:]]


@pytest.mark.parametrize(
    ("progress", "size", "least"), [(0.0, 16, 0.0), (0.5, 24, 0.4), (1.0, 32, 0.8)]
)
def test_curricula_at_the_beginning_the_middle_and_the_end(
    progress: float, size: int, least: float
) -> None:
    config = D3LLMConfig(data=Path("d"), output=Path("o"))
    assert window_size(config.window_sizes, progress) == size
    ratio = least_mask_ratio(config.mask_ratio_start, config.mask_ratio_max, progress)
    assert ratio == pytest.approx(least)


def test_windows_share_the_run_evenly() -> None:
    found = [window_size((4, 6, 8), step / 9) for step in range(9)]
    assert found == [4, 4, 4, 6, 6, 6, 8, 8, 8]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_length": 250}, "multiple of block_size"),
        ({"trajectory_steps": 100}, "multiple of 8"),
        ({"trajectory_steps": 512}, "up to 256"),
        ({"window_sizes": (16, 512)}, "at most response_length"),
        ({"mask_ratio_start": 0.9}, "at most mask_ratio_max"),
        ({"logit_shift": 2}, "logit_shift"),
        ({"window_size": 3}, "Did you mean 'window_sizes'"),
    ],
)
def test_configurations_that_cannot_work_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        D3LLMConfig(data=Path("d"), output=Path("o"), **fields)
