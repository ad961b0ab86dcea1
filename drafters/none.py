"""No draft: every step is plain AR decoding, the baseline in the same loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybrid.decode.fallback import empty_proposal

if TYPE_CHECKING:
    from hybrid.protocols import DraftState
    from hybrid.types import Plan, Proposal, StepRecord


class NoDrafter:
    """Proposes nothing."""

    name = "none"
    taps: tuple[int, ...] = ()
    max_draft_tokens = 0

    def draft(self, state: DraftState, plan: Plan) -> Proposal:
        """Return an empty proposal, [B, 0]."""
        return empty_proposal(len(state.rows))

    def observe(self, record: StepRecord) -> None:
        """Nothing to learn."""

    def reset(self) -> None:
        """Nothing to forget."""
