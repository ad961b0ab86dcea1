"""Commit one row's verdict: tokens, stop rules and what the record says of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from hybrid.sampling import token_logprobs
from hybrid.types import Mode, Proposal, Route, RowStep, Source

if TYPE_CHECKING:
    from hybrid.decode.judging import Judgement
    from hybrid.decode.step import Engine


def commit_row(
    engine: Engine,
    batch_row: int,
    judged: Judgement,
    logits: Tensor,
    num_unverified: int = 0,
) -> RowStep:
    """Append the accepted tokens and the next token, up to where a stop rule ends the row.

    Args:
        engine: the parts; the row's state is changed, its cache row is not.
        batch_row: index among the active rows.
        judged: what the target said.
        logits: [B, T, V] of the target, before the sampling transforms.
        num_unverified: leading drafted tokens that the verifier was not asked about.
    """
    row = engine.rows[batch_row]
    drafted, num_accepted = judged.drafted[batch_row], judged.verdict.num_accepted[batch_row]
    tokens = (*drafted[:num_accepted], judged.verdict.next_token[batch_row])
    num_drafted = len(drafted)
    rule = engine.rules[row.row]
    committed: list[int] = []
    for token in tokens:
        committed.append(token)
        row.finish_reason = rule.push(token)
        if row.finish_reason is not None:
            break
    row.tokens.extend(committed)
    logprobs, top = _logprobs(row.sampling.logprobs, logits[batch_row], committed)
    return RowStep(
        index=row.row,
        tokens=tuple(committed),
        sources=_sources(num_drafted, num_accepted, num_unverified)[: len(committed)],
        mode=Mode.SPECULATIVE if num_drafted else Mode.AR,
        num_drafted=num_drafted,
        num_accepted=num_accepted,
        num_unverified=num_unverified,
        drafted=drafted,
        logprobs=logprobs,
        top_logprobs=top,
        finish_reason=row.finish_reason,
    )


def describe_row(
    engine: Engine,
    batch_row: int,
    step: RowStep,
    proposed: Proposal,
    route: Route | None,
    judged: Judgement,
) -> RowStep:
    """Complete what a step says of a row.

    Args:
        engine: the parts, after the step.
        batch_row: index among the rows of the step.
        step: from `commit_row`.
        proposed: before the router cut it.
        route: of the row, None where the pass carried nothing.
        judged: what the target said.
    """
    points = () if route is None else route.points
    mode = step.mode
    if step.num_unverified:
        mode = Mode.DIFFUSION_ONLY
    elif points:
        mode = Mode.FUSED if len(points) == 1 else Mode.ONE_PASS
    left = engine.slots.get(step.index)
    count = proposed.num_tokens[batch_row]

    def values(name: str) -> tuple[float, ...]:
        return tuple(judged.certainty[name][batch_row][:count]) if name in judged.certainty else ()

    return replace(
        step,
        mode=mode,
        num_proposed=count,
        disagreements=judged.disagreements[batch_row],
        entropies=values("entropy"),
        confidences=values("confidence"),
        margins=values("margin"),
        first_slot=proposed.first_slot[batch_row] if proposed.first_slot and count else 0,
        points=points,
        num_slots=0 if left is None else len(left.hidden),
        next_slot=0 if left is None else left.first_slot,
        next_entropy=judged.next_entropy[batch_row],
    )


def _sources(num_drafted: int, num_accepted: int, num_unverified: int) -> tuple[Source, ...]:
    if num_drafted == 0:
        return (Source.AR,)
    last = Source.BONUS if num_accepted == num_drafted else Source.CORRECTION
    verified = (Source.DRAFT_VERIFIED,) * (num_accepted - num_unverified)
    return (Source.DIFFUSION_ONLY,) * num_unverified + verified + (last,)


def _logprobs(
    top_n: int | None, logits: Tensor, tokens: list[int]
) -> tuple[tuple[float, ...], tuple[Mapping[int, float], ...]]:
    if top_n is None:
        return (), ()
    return token_logprobs(logits[: len(tokens)], tokens, top_n)
