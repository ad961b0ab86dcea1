"""`Profile`: what a calibration found for one model, adapter, domain and temperature, as JSON.

It holds no date and no path: the same evidence gives the same file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from hybrid.config import Config
from hybrid.errors import CheckpointError, ConfigError
from hybrid.files import write_json
from hybrid.router.acceptance import AcceptanceModel
from hybrid.router.cost import CostModel
from hybrid.router.logistic import LogisticCurve

FORMAT = 1


class Threshold(Config):
    """A threshold that the calibration accepted, and its evidence.

    Attributes:
        threshold: tokens with at least this score are committed unverified.
        num_prompts: independent prompts that it was tested on.
        num_tokens: tokens of these that it left unverified.
        disagreements: how many of them AR would not have chosen.
        p_value: of "the share that disagrees is `risk` or more".
        upper_bound: of that share, with confidence 1 - delta.
        tokens_per_forward: of decoding with it, on the same prompts.
    """

    threshold: float
    num_prompts: Annotated[int, Field(ge=1)]
    num_tokens: Annotated[int, Field(ge=0)]
    disagreements: Annotated[float, Field(ge=0)]
    p_value: Annotated[float, Field(ge=0, le=1)]
    upper_bound: Annotated[float, Field(ge=0, le=1)] = 1.0
    tokens_per_forward: Annotated[float, Field(ge=0)] = 0.0


class Profile(Config):
    """A calibration.

    Attributes:
        format: of the file.
        model: whose target.
        adapter: whose drafts; None for a model that drafts by itself.
        domain: what the prompts were.
        temperature: of all of them; acceptance and disagreement depend on it.
        risk: that the thresholds keep.
        delta: chance that they do not.
        most: tokens of a prompt that count in the tests at most; a prompt with more counts as if
            it had so many, with the same share.
        lossless_tokens_per_forward: of decoding without trust, on the first part of the prompts.
        thresholds: strict to lax.
        calibration: by slot, from the confidence to the probability that AR agrees.
        router: fields of `RouterConfig` that the prompts were decoded with; the promise holds for
            decoding with the same. None is any.
        costs: see `CostModel.to_dict`; None if none were measured.
        acceptance: see `AcceptanceModel.to_dict`; None without counts.
    """

    format: int = FORMAT
    model: str
    adapter: str | None = None
    domain: str
    temperature: Annotated[float, Field(ge=0)] = 0.0
    risk: Annotated[float, Field(gt=0, lt=1)]
    delta: Annotated[float, Field(gt=0, lt=1)] = 0.05
    most: Annotated[float, Field(gt=0)] = 1.0
    lossless_tokens_per_forward: Annotated[float, Field(ge=0)] = 0.0
    thresholds: tuple[Threshold, ...] = ()
    calibration: dict[int, LogisticCurve] = Field(default_factory=dict)
    router: dict[str, Any] | None = None
    costs: dict[str, Any] | None = None
    acceptance: dict[str, Any] | None = None

    @field_validator("format")
    @classmethod
    def _is_known(cls, value: int) -> int:
        if value != FORMAT:
            raise ValueError(
                f"got a profile of format {value}, expected {FORMAT}. Calibrate again with this "
                "version, or update it."
            )
        return value

    @field_validator("thresholds")
    @classmethod
    def _fall(cls, values: tuple[Threshold, ...]) -> tuple[Threshold, ...]:
        if any(not a.threshold > b.threshold for a, b in pairwise(values)):
            found = [value.threshold for value in values]
            raise ValueError(f"got {found}, expected falling thresholds, strict to lax.")
        return values

    @field_validator("costs", "acceptance")
    @classmethod
    def _can_be_read(cls, value: dict[str, Any] | None, info: Any) -> dict[str, Any] | None:
        if value is not None:
            (CostModel if info.field_name == "costs" else AcceptanceModel).from_dict(value)
        return value

    def score(self, slot: int, confidence: float) -> float:
        """Return what is compared with the thresholds.

        Args:
            slot: of its draft that a token comes from, from 1.
            confidence: largest probability of the slot's distribution.
        """
        if confidence != confidence:
            return -math.inf
        curve = self.calibration.get(slot)
        return confidence if curve is None else curve(confidence)

    def num_trusted(self, first_slot: int, confidences: Sequence[float], level: int | None) -> int:
        """Return how many leading tokens of a draft a level trusts.

        Args:
            first_slot: which slot the first token is; 0, a copied draft, is never trusted.
            confidences: of the tokens; NaN is never trusted.
            level: index of the threshold; None trusts nothing.
        """
        if level is None or first_slot == 0:
            return 0
        least = self.thresholds[level].threshold
        trusted = takewhile(
            lambda item: self.score(*item) >= least, enumerate(confidences, first_slot)
        )
        return sum(1 for _ in trusted)

    def fits(self, model: str, adapter: str | None, temperature: float) -> bool:
        """Return whether a request is of this model, adapter and temperature."""
        same = (model, adapter) == (self.model, self.adapter)
        return same and math.isclose(temperature, self.temperature)

    def check(self, model: str, adapter: str | None, temperature: float, risk: float) -> None:
        """Refuse a request that the profile says nothing about.

        Raises:
            ConfigError: another model, adapter or temperature, or a smaller risk.
        """
        for name, got, own in (("model", model, self.model), ("adapter", adapter, self.adapter)):
            if got != own:
                raise ConfigError(
                    f"profile: got {name} {got!r}, expected {own!r}, which it was calibrated for. "
                    "Calibrate this one, or use risk=0."
                )
        if not math.isclose(temperature, self.temperature):
            raise ConfigError(
                f"profile: got temperature {temperature}, expected {self.temperature}, which it "
                "was calibrated at. Calibrate at this one, or use risk=0."
            )
        if risk < self.risk:
            raise ConfigError(
                f"profile: got risk {risk}, expected {self.risk} or more, which its thresholds "
                "keep. Calibrate with this risk, or use risk=0."
            )

    def save(self, path: Path) -> None:
        """Write the profile.

        Raises:
            CheckpointError: the file cannot be written; what was there before is intact.
        """
        write_json(path, self.model_dump(mode="json"))

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read a profile.

        Raises:
            CheckpointError: there is no such file, or it is no profile of this format.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(data, dict):
                raise ConfigError(f"got {type(data).__name__}, expected names and values.")
            return cls(**data)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} is not a profile that can be used: {error}") from error
