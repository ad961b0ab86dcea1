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
from hybrid.decode.commit import commit_row
from hybrid.decode.fallback import absorb_or_nothing, draft_or_nothing, observe_or_nothing
from hybrid.decode.stopping import StopRule
from hybrid.protocols import (
    Backbone,
    Cache,
    Drafter,
    DraftState,
    ForwardOutput,
    Router,
    Verifier,
)
from hybrid.sampling import process_logits
from hybrid.types import Mode, Proposal, SequenceState, StepRecord, Verdict


@dataclass(slots=True)
class Engine:
    """The parts of one call. Rows, rules and hidden taps are changed by the loop alone.

    Attributes:
        rows: active rows, in the order of the requests.
        rules: stop rule of each cache row.
        hidden: {layer: [B, C]} taps of each active row's last cached token.
        history: what the steps so far did.
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
    drafter_failed: bool = False
    barred: tuple[int, ...] = ()


def decode_step(engine: Engine) -> StepRecord:
    """Run one step for all active rows and drop the rows that ended.

    Returns:
        What happened; every active row committed at least one token.
    """
    started = time.perf_counter()
    rows = engine.rows
    plan = engine.router.plan(rows, engine.history)
    state = DraftState(rows, engine.cache, engine.hidden)
    proposal = draft_or_nothing(engine, state, plan)
    drafted = time.perf_counter()

    inputs, positions = _inputs(rows, proposal, engine.backbone.device)
    pattern = causal([row.cached_len for row in rows], inputs.shape[1])
    out = engine.backbone.forward(
        inputs,
        positions,
        pattern,
        engine.cache,
        [row.row for row in rows],
        taps=engine.drafter.taps,
    )
    logits = bar(engine, out)
    forwarded = time.perf_counter()
    verdict = transform_and_verify(engine, logits, proposal)
    steps = [commit_row(engine, b, proposal, verdict, logits) for b in range(len(rows))]
    for row, step in zip(rows, steps, strict=True):
        # K/V of the anchor and of all but the last committed token, which is the next anchor.
        engine.cache.commit(row.row, len(step.tokens))
    absorb_or_nothing(
        engine, [row.row for row in rows], out.hidden, [len(step.tokens) for step in steps]
    )
    record = StepRecord(
        mode=Mode.SPECULATIVE if max(proposal.num_tokens) > 0 else Mode.AR,
        rows=tuple(steps),
        num_draft_forwards=proposal.num_forwards,
        width=inputs.shape[1],
        forward_seconds=forwarded - drafted,
        draft_seconds=drafted - started,
        seconds=time.perf_counter() - started,
    )
    keep_taps(engine, out.hidden, verdict.num_accepted)
    observe_or_nothing(engine, record)
    engine.history.append(record)
    return record


def bar(engine: Engine, out: ForwardOutput) -> Tensor:
    """Return the logits of a target pass with the ids that are no answer at -inf."""
    assert out.logits is not None
    if not engine.barred:
        return out.logits
    ids = torch.tensor(engine.barred, device=out.logits.device)
    return out.logits.index_fill(-1, ids, float("-inf"))


def transform_and_verify(engine: Engine, logits: Tensor, proposal: Proposal) -> Verdict:
    """Apply each row's sampling transforms to the target's logits and verify."""
    rows = engine.rows
    if any(needs_transform(row) for row in rows):
        tokens = proposal.tokens.tolist()  # host sync
        processed = [
            process_logits(
                logits[b],
                row.sampling,
                row.tokens,
                row.num_prompt_tokens,
                tokens[b],
                engine.backbone.eos_token_ids,
            )
            for b, row in enumerate(rows)
        ]
        logits = torch.stack(processed)
    return engine.verifier.verify(
        logits, proposal, [r.sampling for r in rows], [r.generator for r in rows]
    )


def needs_transform(row: SequenceState) -> bool:
    """Whether the row's logits are changed before the choice."""
    s = row.sampling
    return not s.is_greedy or s.has_penalties or row.num_new_tokens < s.min_new_tokens


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
    anchors = torch.tensor([[row.anchor] for row in rows])
    inputs = torch.cat([anchors.to(device), proposal.tokens.to(device)], dim=1)
    starts = torch.tensor([[row.cached_len] for row in rows])
    return inputs, (starts + torch.arange(inputs.shape[1])).to(device)
