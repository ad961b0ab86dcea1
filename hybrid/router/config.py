"""`RouterConfig`: what a user may say to the router. No threshold is among it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from hybrid.config import Config
from hybrid.types import Mode

ROUTED = (Mode.AR, Mode.SPECULATIVE, Mode.FUSED, Mode.ONE_PASS, Mode.DIFFUSION_ONLY)


class RouterConfig(Config):
    """Settings of `HybridRouter`.

    Attributes:
        num_draft_tokens: K, the most tokens that a step drafts.
        num_slots: tokens that a carried group drafts; None is K + 1, because a group's first slot
            stands where the target's own next token goes.
        risk: share of unverified tokens that AR would not have chosen; 0 verifies everything.
        cost: "measured" milliseconds, or "forwards": every pass costs 1, whatever its width. The
            second one is deterministic, and right for a device that is idle at one row.
        modes: what a step may be. AR always may.
        hysteresis: to draft, or not to, is left only for what is better by this share of a step.
        window: tokens over which an acceptance count is forgotten, and steps over which the speed
            is; a cost is forgotten over as many steps of its shape.
        exploration: share of the time that the first trial of a losing mode may cost; each
            trial that changes nothing doubles the time to the next.
    """

    num_draft_tokens: Annotated[int, Field(ge=1)]
    num_slots: Annotated[int, Field(ge=2)] | None = None
    risk: Annotated[float, Field(ge=0, lt=1)] = 0.0
    cost: Literal["measured", "forwards"] = "measured"
    modes: tuple[Mode, ...] = ROUTED
    hysteresis: Annotated[float, Field(ge=0, lt=1)] = 0.01
    window: Annotated[int, Field(ge=2)] = 64
    exploration: Annotated[float, Field(ge=0, lt=1)] = 0.05

    @field_validator("modes")
    @classmethod
    def _are_routed(cls, modes: tuple[Mode, ...]) -> tuple[Mode, ...]:
        strange = [mode.value for mode in modes if mode not in ROUTED]
        if strange:
            names = ", ".join(mode.value for mode in ROUTED)
            raise ValueError(f"got {', '.join(strange)}, expected some of {names}.")
        return modes

    @property
    def carrying_modes(self) -> tuple[Mode, ...]:
        """Those of `modes` in which the target pass carries slots."""
        return tuple(mode for mode in (Mode.FUSED, Mode.ONE_PASS) if mode in self.modes)

    @property
    def group_size(self) -> int:
        """Tokens that a carried group drafts; 0 where nothing is carried."""
        if not self.carrying_modes:
            return 0
        return self.num_draft_tokens + 1 if self.num_slots is None else self.num_slots
