"""What the student sees: one block of a response as the teacher's trajectory passed it.

The prompt and the blocks before it are clean, all behind it is masked. The curricula decide how
long the block is and how much of it is hidden. Next: hybrid/training/d3llm/recipe.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid.training.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class StudentBatch:
    """One sequence under two complementary masks.

    Attributes:
        input_ids: [2, T] prompt and response; row 1 hides what row 0 shows of the block.
        masked: [2, T] the hidden positions of the block, where the loss is.
        targets: [T] prompt and the teacher's final tokens.
    """

    input_ids: Tensor
    masked: Tensor
    targets: Tensor


def window_size(sizes: Sequence[int], progress: float) -> int:
    """Return the block length at `progress` (0 to 1) of the run: the sizes share it evenly."""
    return sizes[min(int(progress * len(sizes)), len(sizes) - 1)]


def least_mask_ratio(start: float, end: float, progress: float) -> float:
    """Return the lower bound of the mask ratio, which grows linearly over the run."""
    return start + (end - start) * progress


def student_batch(
    prompt: Sequence[int],
    trajectory: Trajectory,
    block: range,
    mask_ratio: float,
    mask_token_id: int,
) -> StudentBatch:
    """Hide of `block` what the teacher had not committed when int((1 - ratio) L) were visible.

    For a block of the trajectory that is the canvas after `block.start + int((1 - ratio) L)`
    forwards of one token each. Through a window of another length it is the last canvas that shows
    at most that many of its L tokens, so that the ratio holds there too.

    Args:
        prompt: ids.
        trajectory: the teacher's response.
        block: its positions in the response.
        mask_ratio: above 0, so that something is hidden.
        mask_token_id: what hides it.
    """
    targets = torch.tensor([*prompt, *trajectory.tokens])
    steps = torch.tensor(trajectory.steps)[block.start : block.stop]
    num_visible = min(int((1 - mask_ratio) * len(block)), len(block) - 1)
    first_hidden = steps.sort().values[num_visible]
    masked = torch.zeros(2, len(targets), dtype=torch.bool)
    start, end = len(prompt) + block.start, len(prompt) + block.stop
    masked[0, start:end] = steps >= first_hidden
    masked[1, start:end] = ~masked[0, start:end]
    later = torch.arange(len(targets)) >= end
    input_ids = torch.where(masked | later, mask_token_id, targets)
    return StudentBatch(input_ids, masked, targets)
