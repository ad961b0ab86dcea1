"""A drafter that raises costs one warning and some speed, never the answer."""

from __future__ import annotations

import warnings

import torch

from hybrid.protocols import Drafter, DraftState
from hybrid.types import Plan, Proposal


class DrafterWarning(RuntimeWarning):
    """A drafter raised; the step went on without a draft."""


def empty_proposal(batch: int) -> Proposal:
    """Return a proposal of no tokens: the step becomes an AR step."""
    return Proposal(torch.empty(batch, 0, dtype=torch.long), (0,) * batch)


def draft_or_nothing(drafter: Drafter, state: DraftState, plan: Plan) -> Proposal:
    """Return the drafter's proposal, or an empty one when it raises.

    Warns:
        DrafterWarning: the drafter raised. Python's default filter shows it once.
    """
    if plan.num_draft_tokens == 0:
        return empty_proposal(len(state.rows))
    try:
        return drafter.draft(state, plan)
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything, the answer must go on
        warnings.warn(
            f"Drafter {drafter.name!r} raised {type(error).__name__}: {error}. "
            "This step decodes without a draft; the output is not affected.",
            DrafterWarning,
            stacklevel=2,
        )
        return empty_proposal(len(state.rows))
