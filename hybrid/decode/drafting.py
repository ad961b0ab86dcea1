"""What a step drafts: for the rows whose plan asks for it, from carried slots or by the drafter.

And what it carries: the slots of the next draft ride in the target pass, and those that fit what
was accepted are kept. Next: hybrid/decode/step.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from hybrid.carried import Carried, KeptSlots
from hybrid.decode.fallback import cut, draft_or_nothing, empty_proposal
from hybrid.errors import ConfigError
from hybrid.protocols import DraftState
from hybrid.transfer import send, take_rows
from hybrid.types import Plan, Proposal, Route

if TYPE_CHECKING:
    from hybrid.decode.step import Engine


def draft_rows(engine: Engine, plans: Sequence[Plan]) -> Proposal:
    """Return the proposal of all rows; a row whose plan asks for nothing gets nothing.

    The drafter sees one plan, for the most tokens that a row asks for. So what it draws for a row
    depends on the others only where they ask for more than it: routers give sampled rows a number
    that never changes.
    """
    rows = engine.rows
    slots = {
        row.row: own
        for row, plan in zip(rows, plans, strict=True)
        if plan.may_reuse
        and row.row in engine.slots
        and (own := engine.slots[row.row].at(len(row.tokens)))
    }
    wanting = [
        b
        for b, (row, plan) in enumerate(zip(rows, plans, strict=True))
        if plan.num_draft_tokens > 0 and (plan.may_draft or row.row in slots)
    ]
    if not wanting:
        return empty_proposal(len(rows))
    hidden = engine.hidden
    if len(wanting) < len(rows):
        hidden = take_rows(hidden, wanting)
    state = DraftState(
        [rows[b] for b in wanting], engine.cache, hidden, slots, engine.router.wants_features
    )
    asked = max((plans[b] for b in wanting), key=lambda plan: plan.num_draft_tokens)
    proposal = draft_or_nothing(engine, state, asked)
    proposal = cut(proposal, [plans[b].num_draft_tokens for b in wanting])
    return proposal if len(wanting) == len(rows) else _spread(proposal, wanting, len(rows))


def route_rows(engine: Engine, proposal: Proposal) -> tuple[Route, ...]:
    """Return what the router makes of the proposal, if it can be done.

    Raises:
        ConfigError: a route trusts or assumes more than it feeds.
    """
    routes = engine.router.judge(engine.rows, proposal, engine.history)
    for route, count in zip(routes, proposal.num_tokens, strict=True):
        fed = min(route.num_draft_tokens, count)
        if not 0 <= route.num_unverified <= fed or any(not 0 <= j <= fed for j in route.points):
            raise ConfigError(
                f"router: got {route} for a row that can feed {fed} drafted tokens, expected "
                "num_unverified and points of at most so many."
            )
    return routes


def keep_slots(
    engine: Engine,
    carried: Carried | None,
    states: Tensor | None,
    routes: Sequence[Route],
    num_accepted: Sequence[int],
) -> None:
    """Keep of each row the carried slots that assumed no more than what was accepted.

    Of several groups that is the one with the nearest acceptance point. A group says nothing of the
    target's own next token but in its first slot, which is passed by. Without a new group, slots
    that were there before and lie further on are still drafts.

    Args:
        engine: the parts; the rows hold the step's tokens already.
        carried: what rode in the pass.
        states: [B, S, C] of its slots.
        routes: whose points it carried.
        num_accepted: per row.
    """
    for b, (row, route) in enumerate(zip(engine.rows, routes, strict=True)):
        fitting = [j for j in route.points if j <= num_accepted[b]]
        if carried is not None and states is not None and fitting:
            size, group = carried.group_size, len(fitting) - 1
            own = states[b, group * size + carried.first_drafting : (group + 1) * size]
            # cached_len has moved on by the accepted tokens and one more.
            anchor = row.cached_len - (num_accepted[b] + 1) + fitting[-1]
            engine.slots[row.row] = KeptSlots(anchor + 1, 1, own)
        left = engine.slots.pop(row.row, None)
        left = None if left is None else left.at(len(row.tokens))
        if left is not None and row.finish_reason is None:
            engine.slots[row.row] = left


def _spread(proposal: Proposal, wanting: Sequence[int], batch: int) -> Proposal:
    """Return the proposal of some rows as one of all; the others propose nothing."""

    def rows_of(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        whole = values.new_zeros(batch, *values.shape[1:])
        return whole.index_copy_(0, send(wanting, values.device), values)

    def numbers(values: Sequence[int]) -> tuple[int, ...]:
        own = dict(zip(wanting, values, strict=True))
        return tuple(own.get(b, 0) for b in range(batch))

    tokens, first_slot = rows_of(proposal.tokens), proposal.first_slot
    assert tokens is not None
    return replace(
        proposal,
        tokens=tokens,
        num_tokens=numbers(proposal.num_tokens),
        draft_probs=rows_of(proposal.draft_probs),
        entropy=rows_of(proposal.entropy),
        confidence=rows_of(proposal.confidence),
        margin=rows_of(proposal.margin),
        first_slot=None if first_slot is None else numbers(first_slot),
    )
