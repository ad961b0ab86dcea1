"""Configuration of the D2F recipe. Next: hybrid/training/d2f/recipe.py."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from hybrid.training.config import Positive, Rate
from hybrid.training.masked_diffusion import MaskedDiffusionConfig

_Ratio = Annotated[float, Field(gt=0, le=1)]


class D2FConfig(MaskedDiffusionConfig):
    """The fields of `MaskedDiffusionConfig`, and these. Defaults are the paper's for LLaDA.

    Attributes:
        mask_ratio_min: least mask ratio of the first block, ...
        mask_ratio_max: ... and the most of any block.
        confidence_threshold: probability above which an evaluation commits a token.
    """

    mask_ratio_min: _Ratio = 0.2
    mask_ratio_max: _Ratio = 0.7
    confidence_threshold: Annotated[float, Field(ge=0, le=1)] = 0.9
    block_size: Positive = 16
    rank: Positive | None = 32
    lora_alpha: Rate = 32.0
    learning_rate: Rate = 1e-5

    @model_validator(mode="after")
    def _check(self) -> D2FConfig:
        if self.mask_ratio_min > self.mask_ratio_max:
            raise ValueError(
                f"mask_ratio_min: got {self.mask_ratio_min}, expected at most mask_ratio_max "
                f"({self.mask_ratio_max})."
            )
        return self
