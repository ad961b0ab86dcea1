"""What the target says of a step: transforms, verification, and evidence on what was not verified.

All that the host has to know of a step comes from the device in one transfer, at the end of
`judge_draft`. Next: verifiers/rejection.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybrid.errors import ConfigError, ProposalError
from hybrid.protocols import ForwardOutput
from hybrid.sampling import argmax, entropy, process_logits
from hybrid.transfer import DeviceVerdict, read, send
from hybrid.types import CERTAINTY, Proposal, Route, SequenceState, Verdict

if TYPE_CHECKING:
    from hybrid.decode.step import Engine


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the target pass of a step says, in plain numbers.

    Attributes:
        verdict: tokens that were committed unverified count as accepted.
        drafted: per row, the ids that the target was fed.
        certainty: of the whole proposal, those of `CERTAINTY` that it has: [B][K].
        disagreements: per row, for each token committed unverified the probability with which the
            target would have rejected it.
        next_entropy: per row, entropy of the distribution behind the next token, nats; None where
            the router does not ask.
    """

    verdict: Verdict
    drafted: tuple[tuple[int, ...], ...]
    certainty: Mapping[str, Sequence[Sequence[float]]]
    disagreements: tuple[tuple[float, ...], ...]
    next_entropy: tuple[float | None, ...]


def judge_draft(
    engine: Engine,
    logits: Tensor,
    proposed: Proposal,
    proposal: Proposal,
    routes: Sequence[Route],
) -> Judgement:
    """Apply each row's sampling transforms to the target's logits, verify, and gather evidence.

    Args:
        engine: the parts.
        logits: [B, K+1, V] of the target.
        proposed: what was drafted.
        proposal: what was fed of it.
        routes: per row.

    Raises:
        ConfigError: the target's logits are no law.
        ProposalError: draft_probs gives 0 to a token that was drafted.
    """
    unverified = [route.num_unverified for route in routes]
    logits = transform(engine, logits, proposal)
    wanted = {"drafted": proposal.tokens}
    for name in CERTAINTY:
        if (own := getattr(proposed, name)) is not None:
            wanted[name] = own
    if any(unverified):
        verdict = _verify_behind(engine, logits, proposal, unverified)
        for b, (row, count) in enumerate(zip(engine.rows, unverified, strict=True)):
            wanted[f"doubts {b}"] = _doubts(logits[b], proposal, b, count, row)
    else:
        verdict = verify(engine, logits, proposal)
    if isinstance(verdict, DeviceVerdict):
        wanted |= {"accepted": verdict.num_accepted, "next": verdict.next_token}
    if engine.router.wants_features:
        wanted["entropy behind"] = entropy(_behind(logits, verdict.num_accepted, unverified))
    found, nothing = read(wanted), [None] * len(routes)
    if isinstance(verdict, DeviceVerdict):
        verdict = _checked(found["accepted"], found["next"])
    doubts: tuple[tuple[float, ...], ...] = ((),) * len(routes)
    if any(unverified):
        accepted = (u + n for u, n in zip(unverified, verdict.num_accepted, strict=True))
        verdict = Verdict(tuple(accepted), verdict.next_token)
        doubts = tuple(tuple(found[f"doubts {b}"]) for b in range(len(routes)))
    return Judgement(
        verdict,
        tuple(
            [tuple(ids[:n]) for ids, n in zip(found["drafted"], proposal.num_tokens, strict=True)]
        ),
        {name: found[name] for name in CERTAINTY if name in found},
        doubts,
        tuple(found.get("entropy behind", nothing)),
    )


def bar(engine: Engine, out: ForwardOutput) -> Tensor:
    """Return the logits of a target pass with the ids that are no answer at -inf."""
    assert out.logits is not None
    if not engine.barred:
        return out.logits
    ids = send(engine.barred, out.logits.device)
    return out.logits.index_fill(-1, ids, float("-inf"))


def transform(engine: Engine, logits: Tensor, proposal: Proposal) -> Tensor:
    """Return the logits [B, T, V] after each row's sampling transforms."""
    rows = engine.rows
    if not any(needs_transform(row) for row in rows):
        return logits
    processed = [
        process_logits(
            logits[b],
            row.sampling,
            row.tokens,
            row.num_prompt_tokens,
            proposal.tokens[b],
            engine.backbone.eos_token_ids,
        )
        if row.transform is None
        else row.transform(logits[b], proposal.tokens[b, : proposal.num_tokens[b]].tolist())
        for b, row in enumerate(rows)
    ]
    return torch.stack(processed)


def needs_transform(row: SequenceState) -> bool:
    """Whether the row's logits are changed before the choice."""
    s = row.sampling
    if row.transform is not None:
        return True
    return not s.is_greedy or s.has_penalties or row.num_new_tokens < s.min_new_tokens


def verify(engine: Engine, logits: Tensor, proposal: Proposal) -> Verdict | DeviceVerdict:
    """Ask the verifier; `logits` are transformed."""
    rows = engine.rows
    return engine.verifier.verify(
        logits, proposal, [r.sampling for r in rows], [r.stream for r in rows]
    )


def _verify_behind(
    engine: Engine, logits: Tensor, proposal: Proposal, unverified: Sequence[int]
) -> Verdict | DeviceVerdict:
    """Verify what follows the tokens that are committed anyway, each row shifted by their number.

    What the verifier does not see it draws no random number for, and does not count.
    """
    batch, width = proposal.tokens.shape
    shift = torch.tensor(unverified)[:, None]
    columns = (torch.arange(width + 1) + shift).clamp(max=width)
    drafted, laws = columns[:, :-1].clamp(max=max(width - 1, 0)), proposal.draft_probs
    rest = replace(
        proposal,
        tokens=_gathered(proposal.tokens, drafted),
        num_tokens=tuple(n - u for n, u in zip(proposal.num_tokens, unverified, strict=True)),
        draft_probs=None if laws is None else _gathered(laws, drafted),
        entropy=None,
        confidence=None,
        margin=None,
    )
    return verify(engine, _gathered(logits, columns), rest)


def _gathered(values: Tensor, columns: Tensor) -> Tensor:
    """Return [B, n, ...] of values [B, m, ...]: those of each row's own columns [B, n], CPU."""
    at = torch.arange(len(values), device=values.device)[:, None]
    return values[at, columns.to(values.device, non_blocking=True)]


def _behind(
    logits: Tensor, num_accepted: Sequence[int] | Tensor, unverified: Sequence[int]
) -> Tensor:
    """Return the logits [B, V] that gave each row's next token."""
    if isinstance(num_accepted, Tensor):
        places = num_accepted.clamp(min=0) + send(unverified, logits.device)
        return logits[torch.arange(len(logits), device=logits.device), places]
    index = [u + n for u, n in zip(unverified, num_accepted, strict=True)]
    return logits[range(len(logits)), index]


def _checked(num_accepted: Sequence[int], next_token: Sequence[int]) -> Verdict:
    """Return the verdict, if it is one; see `DeviceVerdict`."""
    if min(num_accepted) < 0:
        raise ProposalError(
            f"draft_probs: row {list(num_accepted).index(-1)} gives probability 0, or none, to a "
            "token that it proposes. A drafter must report the distribution that it drew from, or "
            "None for a token that it chose without drawing."
        )
    if min(next_token) < 0:
        raise ConfigError(
            f"Token probabilities: row {list(next_token).index(-1)} has no law. The model's logits "
            "hold NaN or exclude every token; try dtype='float32' or check the checkpoint."
        )
    return Verdict(tuple(num_accepted), tuple(next_token))


def _doubts(
    logits: Tensor, proposal: Proposal, batch_row: int, count: int, row: SequenceState
) -> Tensor:
    """Return how probably the target would have rejected each of the first `count` tokens.

    Greedy: 1 where its argmax is another. Sampled: 1 - min(1, target / draft probability), the
    rejection probability of speculative sampling (arXiv:2211.17192). Each is judged behind the
    tokens before it as they were committed.
    """
    tokens = proposal.tokens[batch_row, :count].to(logits.device, non_blocking=True)
    if row.sampling.is_greedy:
        return (argmax(logits[:count]) != tokens).double()
    index = tokens[:, None]
    target = logits[:count].double().softmax(dim=-1).gather(1, index)[:, 0]
    if proposal.draft_probs is None:
        return 1 - target
    laws = proposal.draft_probs[batch_row, :count].to(target)
    draft = (laws / laws.sum(dim=-1, keepdim=True)).gather(1, index)[:, 0]
    return (1 - target / draft).clamp(min=0)
