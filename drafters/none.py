"""No draft: every step is plain AR decoding, the baseline in the same loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hybrid.types import Proposal

if TYPE_CHECKING:
    from hybrid.protocols import DraftState
    from hybrid.types import Plan, StepRecord


class NoDrafter:
    """Proposes nothing."""

    name = "none"
    taps: tuple[int, ...] = ()
    max_draft_tokens = 0

    def draft(self, state: DraftState, plan: Plan) -> Proposal:
        """Return an empty proposal, [B, 0]."""
        batch = len(state.rows)
        return Proposal(torch.empty(batch, 0, dtype=torch.long), (0,) * batch)

    def observe(self, record: StepRecord) -> None:
        """Nothing to learn."""

    def reset(self) -> None:
        """Nothing to forget."""
