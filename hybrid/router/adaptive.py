"""The router behind strategy "auto": draft only while that is the faster way on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid.types import Mode, Plan, Proposal, SequenceState, StepRecord

_AR = Plan(Mode.AR, 0)


class AdaptiveRouter:
    """Compares the measured tokens per second of AR and speculative steps, and re-tries the loser.

    A sampled row always gets the same number of drafted tokens: its random stream follows the
    draft, so a choice made by the clock would make a seed worthless.
    """

    def __init__(self, num_draft_tokens: int, *, window: int = 16, probe_every: int = 64) -> None:
        """Keep the numbers.

        Args:
            num_draft_tokens: what a speculative step drafts.
            window: the most recent steps of each mode that are compared; a quarter of it is the
                least, so a mode with fewer is tried.
            probe_every: steps after which the slower mode is tried again.
        """
        self._speculative = Plan(Mode.SPECULATIVE, num_draft_tokens)
        self._window, self._probe_every = window, probe_every

    def plan(self, rows: Sequence[SequenceState], history: Sequence[StepRecord]) -> Plan:
        """Return the plan of the next step, from the records alone."""
        if any(not row.sampling.is_greedy for row in rows):
            return self._speculative
        recent = history[-self._probe_every :]
        ar = [r for r in recent if r.mode == Mode.AR][-self._window :]
        speculative = [r for r in recent if r.mode == Mode.SPECULATIVE][-self._window :]
        if len(speculative) < self._window // 4:
            return self._speculative
        if len(ar) < self._window // 4:
            return _AR
        return self._speculative if _speed(speculative) >= _speed(ar) else _AR

    def judge(self, proposal: Proposal) -> int:
        """Trust nothing unverified."""
        return 0


def _speed(records: Sequence[StepRecord]) -> float:
    tokens = sum(len(row.tokens) for record in records for row in record.rows)
    return tokens / max(sum(record.seconds for record in records), 1e-9)
