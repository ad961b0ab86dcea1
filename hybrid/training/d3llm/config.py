"""Configuration of the d3LLM recipe. Next: hybrid/training/d3llm/recipe.py."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from hybrid.training.config import Positive, Rate
from hybrid.training.masked_diffusion import MaskedDiffusionConfig

_Share = Annotated[float, Field(ge=0, le=1)]
_NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class D3LLMConfig(MaskedDiffusionConfig):
    """The fields of `MaskedDiffusionConfig`, and these.

    Defaults are the paper's for LLaDA where it names them.

    Attributes:
        teacher: the model whose trajectories are distilled; None is `model` before training.
        response_length: tokens that the teacher fills behind each prompt, a multiple of
            `block_size`. The responses in the data are not used.
        trajectory_steps: forwards of a trajectory, a multiple of its blocks; None is one per token.
        teacher_batch_size: prompts that the teacher decodes together.
        window_sizes: lengths of the block that the student learns on; they share the run evenly.
        mask_ratio_start: the mask ratio is drawn from [current, `mask_ratio_max`], where current
            grows from here ...
        mask_ratio_max: ... to here over the run.
        entropy_weight: of the entropy of right predictions (2 for LLaDA, 1 for Dream).
        entropy_temperature: at which that entropy is taken.
        entropy_threshold: nats up to which an evaluation commits a token.
    """

    teacher: str | None = None
    response_length: Positive = 256
    trajectory_steps: Positive | None = None
    teacher_batch_size: Positive = 8
    window_sizes: Annotated[tuple[Positive, ...], Field(min_length=1)] = (16, 16, 24, 24, 32, 32)
    mask_ratio_start: _Share = 0.0
    mask_ratio_max: Annotated[float, Field(gt=0, le=1)] = 0.8
    entropy_weight: _NotNegative = 2.0
    entropy_temperature: Rate = 0.5
    entropy_threshold: _NotNegative = 0.4
    learning_rate: Rate = 2e-5
    sequences_per_step: Positive = 16

    @model_validator(mode="after")
    def _check(self) -> D3LLMConfig:
        if self.response_length % self.block_size:
            raise ValueError(
                f"response_length: got {self.response_length}, expected a multiple of block_size "
                f"({self.block_size})."
            )
        steps, blocks = self.num_trajectory_steps, self.response_length // self.block_size
        if steps % blocks or steps > self.response_length:
            raise ValueError(
                f"trajectory_steps: got {steps}, expected a multiple of {blocks} (the blocks of a "
                f"response) up to {self.response_length}."
            )
        if max(self.window_sizes) > self.response_length:
            raise ValueError(
                f"window_sizes: got {max(self.window_sizes)}, expected at most response_length "
                f"({self.response_length})."
            )
        if self.mask_ratio_start > self.mask_ratio_max:
            raise ValueError(
                f"mask_ratio_start: got {self.mask_ratio_start}, expected at most mask_ratio_max "
                f"({self.mask_ratio_max})."
            )
        return self

    @property
    def num_trajectory_steps(self) -> int:
        """Forwards of a trajectory."""
        return self.trajectory_steps or self.response_length
