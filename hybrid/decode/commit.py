"""Commit one row's verdict: tokens, stop rules and what the record says of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from hybrid.sampling import token_logprobs
from hybrid.types import Proposal, RowStep, Source, Verdict

if TYPE_CHECKING:
    from hybrid.decode.step import Engine


def commit_row(
    engine: Engine, batch_row: int, proposal: Proposal, verdict: Verdict, logits: Tensor
) -> RowStep:
    """Append the accepted tokens and the next token, up to where a stop rule ends the row.

    Args:
        engine: the parts; the row's state is changed, its cache row is not.
        batch_row: index among the active rows.
        proposal: what was drafted.
        verdict: what the verifier decided.
        logits: [B, T, V] of the target, before the sampling transforms.
    """
    row = engine.rows[batch_row]
    num_drafted, num_accepted = proposal.num_tokens[batch_row], verdict.num_accepted[batch_row]
    drafted = proposal.tokens[batch_row, :num_drafted].tolist() if num_drafted else []
    tokens = [*drafted[:num_accepted], verdict.next_token[batch_row]]
    rule = engine.rules[row.row]
    committed: list[int] = []
    for token in tokens:
        committed.append(token)
        row.finish_reason = rule.push(token)
        if row.finish_reason is not None:
            break
    row.tokens.extend(committed)
    logprobs, top = _logprobs(row.sampling.logprobs, logits[batch_row], committed)
    entropy = proposal.entropy
    return RowStep(
        index=row.row,
        tokens=tuple(committed),
        sources=_sources(num_drafted, num_accepted)[: len(committed)],
        num_drafted=num_drafted,
        num_accepted=num_accepted,
        drafted=tuple(drafted),
        entropies=() if entropy is None else tuple(entropy[batch_row, :num_drafted].tolist()),
        logprobs=logprobs,
        top_logprobs=top,
        finish_reason=row.finish_reason,
    )


def _sources(num_drafted: int, num_accepted: int) -> tuple[Source, ...]:
    if num_drafted == 0:
        return (Source.AR,)
    last = Source.BONUS if num_accepted == num_drafted else Source.CORRECTION
    return (Source.DRAFT_VERIFIED,) * num_accepted + (last,)


def _logprobs(
    top_n: int | None, logits: Tensor, tokens: list[int]
) -> tuple[tuple[float, ...], tuple[Mapping[int, float], ...]]:
    if top_n is None:
        return (), ()
    return token_logprobs(logits[: len(tokens)], tokens, top_n)
