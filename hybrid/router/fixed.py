"""The router that always says the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hybrid.types import Mode, Plan, Proposal, Route, SequenceState, StepRecord

# A group's first slot stands where the target's own next token goes; a draft begins behind it.
_NEXT_SLOT = 2


class FixedRouter:
    """Drafts `num_draft_tokens` in every step, in one mode; 0 is plain AR decoding. Lossless."""

    wants_features = False

    def __init__(self, num_draft_tokens: int, mode: Mode = Mode.SPECULATIVE) -> None:
        """Keep the numbers.

        Args:
            num_draft_tokens: K.
            mode: SPECULATIVE drafts in a pass of its own. FUSED lets the target pass carry the next
                draft, assuming that everything is accepted, and drafts in a pass where that was
                wrong. ONE_PASS carries slots for every acceptance point and never drafts alone.
        """
        carries = num_draft_tokens > 0 and mode in {Mode.FUSED, Mode.ONE_PASS}
        self._is_quadratic = carries and mode == Mode.ONE_PASS
        # A group's first slot stands where the target's own next token will: one slot more.
        self.num_slots = num_draft_tokens + 1 if carries else 0
        self.max_points = (num_draft_tokens + 1 if self._is_quadratic else 1) if carries else 0
        chosen = mode if num_draft_tokens else Mode.AR
        self._plan = Plan(chosen, num_draft_tokens, may_draft=not self._is_quadratic)

    def plan(
        self, rows: Sequence[SequenceState], history: Sequence[StepRecord]
    ) -> tuple[Plan, ...]:
        """Return the plan, for every row.

        After a miss of FUSED the end of an older group may be left, which assumed what was not
        accepted: it is not read, a pass drafts.
        """
        last = {step.index: step.next_slot for step in history[-1].rows} if history else {}
        afresh = replace(self._plan, may_reuse=False)
        return tuple(afresh if last.get(row.row, 0) > _NEXT_SLOT else self._plan for row in rows)

    def judge(
        self,
        rows: Sequence[SequenceState],
        proposal: Proposal,
        history: Sequence[StepRecord],
    ) -> tuple[Route, ...]:
        """Feed and verify whatever was proposed."""
        return tuple(
            Route(count, 0, self._points(count) if _goes_on(row) else ())
            for row, count in zip(rows, proposal.num_tokens, strict=True)
        )

    def _points(self, count: int) -> tuple[int, ...]:
        if not self.num_slots:
            return ()
        return tuple(range(count + 1)) if self._is_quadratic else (count,)


def _goes_on(row: SequenceState) -> bool:
    """Whether a row could still draft in the next step, were one token committed in this one."""
    return row.sampling.max_new_tokens - row.num_new_tokens > 2
