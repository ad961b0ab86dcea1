"""One decode step: plan, draft, one target forward, verify, commit. The heart of the engine.

With a plan of 0 drafted tokens the same lines are plain AR decoding. It knows the contracts of
hybrid/protocols.py and nothing behind them. Next: hybrid/decode/loop.py.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybrid.attention.pattern import causal
from hybrid.carried import KeptSlots
from hybrid.decode.commit import commit_row, describe_row
from hybrid.decode.drafting import draft_rows, keep_slots, route_rows
from hybrid.decode.fallback import absorb_or_nothing, carry_or_nothing, cut, observe_or_nothing
from hybrid.decode.judging import bar, judge_draft
from hybrid.decode.stopping import StopRule
from hybrid.protocols import Backbone, Cache, Drafter, DraftState, Router, Verifier
from hybrid.transfer import send
from hybrid.types import Mode, Proposal, SequenceState, StepRecord


@dataclass(slots=True)
class Engine:
    """The parts of one call. Rows, rules and hidden taps are changed by the loop alone.

    Attributes:
        rows: active rows, in the order of the requests.
        rules: stop rule of each cache row.
        hidden: {layer: [B, C]} taps of each active row's last cached token.
        history: what the steps so far did.
        slots: by cache row, carried slots that are left for the next draft.
        drafter_failed: the drafter raised, and the user was told.
        barred: ids that are no answer: mask tokens.
    """

    backbone: Backbone
    cache: Cache
    drafter: Drafter
    verifier: Verifier
    router: Router
    rows: list[SequenceState] = field(default_factory=list)
    rules: dict[int, StopRule] = field(default_factory=dict)
    hidden: dict[int, Tensor] = field(default_factory=dict)
    history: list[StepRecord] = field(default_factory=list)
    slots: dict[int, KeptSlots] = field(default_factory=dict)
    drafter_failed: bool = False
    barred: tuple[int, ...] = ()


def decode_step(engine: Engine) -> StepRecord:
    """Run one step for all active rows and drop the rows that ended.

    Returns:
        What happened; every active row committed at least one token.
    """
    started = time.perf_counter()
    rows = engine.rows
    plans = engine.router.plan(rows, engine.history)
    proposed = draft_rows(engine, plans)
    routes = route_rows(engine, proposed)
    proposal = cut(proposed, [route.num_draft_tokens for route in routes])
    drafted = time.perf_counter()

    inputs, positions = _inputs(rows, proposal, engine.backbone.device)
    state = DraftState(rows, engine.cache, engine.hidden)
    carried = carry_or_nothing(engine, state, inputs, [route.points for route in routes])
    out = engine.backbone.forward(
        inputs,
        positions,
        causal([row.cached_len for row in rows], inputs.shape[1]),
        engine.cache,
        [row.row for row in rows],
        taps=engine.drafter.taps,
        carried=carried,
    )
    logits = bar(engine, out)
    forwarded = time.perf_counter()
    judged = judge_draft(engine, logits, proposed, proposal, routes)
    accepted = judged.verdict.num_accepted
    steps = [
        commit_row(engine, b, judged, logits, routes[b].num_unverified) for b in range(len(rows))
    ]
    for row, step in zip(rows, steps, strict=True):
        # K/V of the anchor and of all but the last committed token, which is the next anchor.
        engine.cache.commit(row.row, len(step.tokens))
    absorb_or_nothing(
        engine, [row.row for row in rows], out.hidden, [len(step.tokens) for step in steps]
    )
    keep_slots(engine, carried, out.carried, routes, accepted)
    has_slots = carried is not None
    steps = [
        describe_row(engine, b, step, proposed, routes[b] if has_slots else None, judged)
        for b, step in enumerate(steps)
    ]
    record = StepRecord(
        mode=max((step.mode for step in steps), key=list(Mode).index),
        rows=tuple(steps),
        num_draft_forwards=proposal.num_forwards,
        num_drafting=proposal.num_drafting,
        width=inputs.shape[1],
        num_carried=0 if carried is None else carried.position_ids.shape[1],
        forward_seconds=forwarded - drafted,
        draft_seconds=drafted - started,
        seconds=time.perf_counter() - started,
    )
    keep_taps(engine, out.hidden, accepted)
    observe_or_nothing(engine, record)
    engine.history.append(record)
    return record


def keep_taps(engine: Engine, hidden: Mapping[int, Tensor], index: Sequence[int]) -> None:
    """Keep the taps of each row's last cached token; drop the rows that ended."""
    alive = [b for b, row in enumerate(engine.rows) if row.finish_reason is None]
    for layer, values in hidden.items():
        engine.hidden[layer] = (
            torch.stack([values[b, index[b]] for b in alive]) if alive else values[:0, 0]
        )
    engine.rows = [engine.rows[b] for b in alive]


def _inputs(
    rows: Sequence[SequenceState], proposal: Proposal, device: torch.device
) -> tuple[Tensor, Tensor]:
    anchors = send([[row.anchor] for row in rows], device)
    inputs = torch.cat([anchors, proposal.tokens.to(device, non_blocking=True)], dim=1)
    width = inputs.shape[1]
    return inputs, send([range(n, n + width) for n in (row.cached_len for row in rows)], device)
