"""The router that always says the same."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid.types import Mode, Plan, Proposal, SequenceState, StepRecord


class FixedRouter:
    """Drafts `num_draft_tokens` in every step; 0 is plain AR decoding. Lossless."""

    def __init__(self, num_draft_tokens: int) -> None:
        """Keep the number."""
        mode = Mode.SPECULATIVE if num_draft_tokens else Mode.AR
        self._plan = Plan(mode, num_draft_tokens)

    def plan(self, rows: Sequence[SequenceState], history: Sequence[StepRecord]) -> Plan:
        """Return the plan."""
        return self._plan

    def judge(self, proposal: Proposal) -> int:
        """Trust nothing unverified."""
        return 0
