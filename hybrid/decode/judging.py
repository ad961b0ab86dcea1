"""What the target says of a step: transforms, verification, and evidence on what was not verified.

Next: verifiers/rejection.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybrid.protocols import ForwardOutput
from hybrid.sampling import argmax, process_logits
from hybrid.types import Proposal, Route, SequenceState, Verdict

if TYPE_CHECKING:
    from hybrid.decode.step import Engine


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the target pass of a step says.

    Attributes:
        verdict: tokens that were committed unverified count as accepted.
        disagreements: per row, for each of these the probability with which the target would have
            rejected it.
        next_entropy: per row, entropy of the distribution behind the next token, nats; None where
            the router does not ask.
    """

    verdict: Verdict
    disagreements: tuple[tuple[float, ...], ...]
    next_entropy: tuple[float | None, ...]


def judge_draft(
    engine: Engine, logits: Tensor, proposal: Proposal, routes: Sequence[Route]
) -> Judgement:
    """Apply each row's sampling transforms to the target's logits, verify, and gather evidence."""
    logits = transform(engine, logits, proposal)
    unverified = [route.num_unverified for route in routes]
    disagreements: list[tuple[float, ...]] = [()] * len(routes)
    if any(unverified):
        disagreements = [
            _disagreements(logits[b], proposal, b, count, engine.rows[b])
            for b, count in enumerate(unverified)
        ]
        verdict = _verify_behind(engine, logits, proposal, unverified)
    else:
        verdict = verify(engine, logits, proposal)
    entropies: list[float | None] = [None] * len(routes)
    if engine.router.wants_features:
        last = logits[range(len(routes)), list(verdict.num_accepted)].float()
        entropies = torch.special.entr(last.softmax(dim=-1)).sum(dim=-1).tolist()
    return Judgement(verdict, tuple(disagreements), tuple(entropies))


def bar(engine: Engine, out: ForwardOutput) -> Tensor:
    """Return the logits of a target pass with the ids that are no answer at -inf."""
    assert out.logits is not None
    if not engine.barred:
        return out.logits
    ids = torch.tensor(engine.barred, device=out.logits.device)
    return out.logits.index_fill(-1, ids, float("-inf"))


def transform(engine: Engine, logits: Tensor, proposal: Proposal) -> Tensor:
    """Return the logits [B, T, V] after each row's sampling transforms."""
    rows = engine.rows
    if not any(needs_transform(row) for row in rows):
        return logits
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
    return torch.stack(processed)


def needs_transform(row: SequenceState) -> bool:
    """Whether the row's logits are changed before the choice."""
    s = row.sampling
    return not s.is_greedy or s.has_penalties or row.num_new_tokens < s.min_new_tokens


def verify(engine: Engine, logits: Tensor, proposal: Proposal) -> Verdict:
    """Ask the verifier; `logits` are transformed."""
    rows = engine.rows
    return engine.verifier.verify(
        logits, proposal, [r.sampling for r in rows], [r.generator for r in rows]
    )


def _verify_behind(
    engine: Engine, logits: Tensor, proposal: Proposal, unverified: Sequence[int]
) -> Verdict:
    """Verify what follows the tokens that are committed anyway, each row shifted by their number.

    What the verifier does not see it draws no random number for.
    """
    batch, width = proposal.tokens.shape
    shift = torch.tensor(unverified)[:, None]
    columns = (torch.arange(width + 1) + shift).clamp(max=width).to(logits.device)
    at = torch.arange(batch, device=logits.device)[:, None]
    drafted = columns[:, :-1].clamp(max=max(width - 1, 0))
    laws = proposal.draft_probs
    rest = replace(
        proposal,
        tokens=proposal.tokens[at.to(proposal.tokens.device), drafted.to(proposal.tokens.device)],
        num_tokens=tuple(n - u for n, u in zip(proposal.num_tokens, unverified, strict=True)),
        draft_probs=None if laws is None else laws[at.to(laws.device), drafted.to(laws.device)],
        entropy=None,
        confidence=None,
        margin=None,
    )
    verdict = verify(engine, logits[at, columns], rest)
    accepted = (u + n for u, n in zip(unverified, verdict.num_accepted, strict=True))
    return replace(verdict, num_accepted=tuple(accepted))


def _disagreements(
    logits: Tensor, proposal: Proposal, batch_row: int, count: int, row: SequenceState
) -> tuple[float, ...]:
    """Return how probably the target would have rejected each of the first `count` tokens.

    Greedy: 1 where its argmax is another. Sampled: 1 - min(1, target / draft probability), the
    rejection probability of speculative sampling (arXiv:2211.17192). Each is judged behind the
    tokens before it as they were committed.
    """
    tokens = proposal.tokens[batch_row, :count].to(logits.device)
    if row.sampling.is_greedy:
        return tuple((argmax(logits[None, :count])[0] != tokens).double().tolist())
    index = tokens[:, None]
    target = logits[:count].double().softmax(dim=-1).gather(1, index)[:, 0]
    if proposal.draft_probs is None:
        return tuple((1 - target).tolist())
    laws = proposal.draft_probs[batch_row, :count].to(target)
    draft = (laws / laws.sum(dim=-1, keepdim=True)).gather(1, index)[:, 0]
    return tuple((1 - target / draft).clamp(min=0).tolist())
