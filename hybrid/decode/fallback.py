"""A drafter that raises or breaks its contract costs a warning and some speed, not the answer."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from hybrid.carried import Carried
from hybrid.errors import ProposalError
from hybrid.protocols import CarryingDrafter, DraftState, can_carry
from hybrid.transfer import decides_on_device
from hybrid.types import CERTAINTY, Plan, Proposal, SequenceState, StepRecord

if TYPE_CHECKING:
    from hybrid.decode.step import Engine


class DrafterWarning(RuntimeWarning):
    """A drafter raised or broke its contract; the step went on without a draft."""


def empty_proposal(batch: int) -> Proposal:
    """Return a proposal of no tokens: the step becomes an AR step."""
    return Proposal(torch.empty(batch, 0, dtype=torch.long), (0,) * batch)


def draft_or_nothing(engine: Engine, state: DraftState, plan: Plan) -> Proposal:
    """Return the drafter's proposal, or an empty one when it raises or proposes nonsense.

    Warns:
        DrafterWarning: once per call of `generate` or `stream`.
    """
    if not state.rows or plan.num_draft_tokens == 0 or _is_useless(state.rows):
        return empty_proposal(len(state.rows))
    try:
        proposal = engine.drafter.draft(state, plan)
        _check(proposal, len(state.rows), plan.num_draft_tokens, engine.backbone.vocab_size)
        return _fit(proposal, state.rows, engine.backbone.vocab_size)
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything, the answer must go on
        _warn(engine, error)
        return empty_proposal(len(state.rows))


def carry_or_nothing(
    engine: Engine, state: DraftState, tokens: Tensor, points: Sequence[Sequence[int]]
) -> Carried | None:
    """Return the slots of the next draft that ride in the target pass, None when there are none.

    Warns:
        DrafterWarning: the drafter raised; once per call of `generate` or `stream`.
    """
    if not any(points) or not can_carry(engine.drafter):
        return None
    carrying = cast(CarryingDrafter, engine.drafter)
    try:
        return carrying.carry(state, tokens, points, engine.router.num_slots)
    except Exception as error:  # noqa: BLE001 - as above
        _warn(engine, error)
        return None


def reset_or_nothing(engine: Engine) -> None:
    """Tell the drafter that a new call begins.

    Warns:
        DrafterWarning: it raised.
    """
    try:
        engine.drafter.reset()
    except Exception as error:  # noqa: BLE001 - as above
        _warn(engine, error)


def observe_or_nothing(engine: Engine, record: StepRecord) -> None:
    """Tell the drafter what became of its proposal.

    Warns:
        DrafterWarning: it raised; once per call of `generate` or `stream`.
    """
    try:
        engine.drafter.observe(record)
    except Exception as error:  # noqa: BLE001 - as above
        _warn(engine, error)


def absorb_or_nothing(
    engine: Engine, rows: Sequence[int], hidden: dict[int, Tensor], num_tokens: Sequence[int]
) -> None:
    """Hand a drafter that wants it what has just joined the cache; see `ContextDrafter.absorb`.

    Warns:
        DrafterWarning: it raised; once per call of `generate` or `stream`.
    """
    absorb = getattr(engine.drafter, "absorb", None)
    if absorb is None:
        return
    try:
        absorb(engine.cache, rows, hidden, num_tokens)
    except Exception as error:  # noqa: BLE001 - as above
        _warn(engine, error)


def _warn(engine: Engine, error: Exception) -> None:
    if engine.drafter_failed:
        return
    engine.drafter_failed = True
    warnings.warn(
        f"Drafter {engine.drafter.name!r} raised {type(error).__name__}: {error}. "
        "Such steps decode without a draft; the output is not affected.",
        DrafterWarning,
        stacklevel=3,
    )


def _check(proposal: Proposal, batch: int, limit: int, vocab_size: int) -> None:
    """Refuse what would crash the step or change its outcome.

    Where the device decides nothing is read, which would be a wait: `_fit` bounds the ids, and
    the verdict says whether a law excludes its token.

    Raises:
        ProposalError: a wrong type, shape, count, id or probability.
    """
    if not isinstance(proposal, Proposal):
        raise ProposalError(f"draft: got {type(proposal).__name__}, expected a Proposal.")
    tokens, counts, draft_probs = proposal.tokens, proposal.num_tokens, proposal.draft_probs
    is_table = tokens.ndim == 2 and tokens.dtype in {torch.int64, torch.int32}
    if not is_table or tokens.shape[0] != batch:
        raise ProposalError(
            f"tokens: got {tokens.dtype} {list(tokens.shape)}, expected integers [{batch}, K]."
        )
    most = min(limit, tokens.shape[1])
    if len(counts) != batch or not all(0 <= count <= most for count in counts):
        raise ProposalError(f"num_tokens: got {counts}, expected {batch} numbers from 0 to {most}.")
    if not decides_on_device(tokens.device):
        ids = [t for row, n in zip(tokens.tolist(), counts, strict=True) for t in row[:n]]
        bad = next((t for t in ids if not 0 <= t < vocab_size), None)
        if bad is not None:
            raise ProposalError(f"tokens: got id {bad}, expected ids from 0 to {vocab_size - 1}.")
    for name in CERTAINTY:
        value = getattr(proposal, name)
        if value is not None and value.shape != tokens.shape:
            raise ProposalError(f"{name}: got {list(value.shape)}, expected {list(tokens.shape)}.")
    if proposal.first_slot is not None and len(proposal.first_slot) != batch:
        raise ProposalError(f"first_slot: got {proposal.first_slot}, expected {batch} numbers.")
    if draft_probs is not None:
        if draft_probs.shape != (*tokens.shape, vocab_size):
            raise ProposalError(
                f"draft_probs: got {list(draft_probs.shape)}, "
                f"expected {[*tokens.shape, vocab_size]}."
            )
        if not decides_on_device(draft_probs.device):
            _check_laws(draft_probs, tokens.to(draft_probs.device), counts)


def _check_laws(draft_probs: Tensor, tokens: Tensor, counts: Sequence[int]) -> None:
    ids = tokens.long().clamp(0, draft_probs.shape[2] - 1).unsqueeze(2)
    is_law = (draft_probs.amin(dim=2) >= 0) & draft_probs.sum(dim=2).isfinite()
    is_law &= draft_probs.gather(2, ids).squeeze(2) > 0
    if not all(all(row[:n]) for row, n in zip(is_law.tolist(), counts, strict=True)):
        raise ProposalError(
            "draft_probs: got a row with NaN, a negative number or 0 for the proposed token, "
            "expected the distribution that the token was drawn from."
        )


def _room(row: SequenceState) -> int:
    """Return how many drafted tokens the row could still commit; the last comes from the target."""
    return row.sampling.max_new_tokens - row.num_new_tokens - 1


def _is_useless(rows: Sequence[SequenceState]) -> bool:
    # A sampled row always drafts: its random stream must not depend on the other rows.
    return all(row.sampling.is_greedy and _room(row) == 0 for row in rows)


def _fit(proposal: Proposal, rows: Sequence[SequenceState], vocab_size: int) -> Proposal:
    """Cut what no row could commit, and make every id, padding too, one that can be embedded."""
    tokens = proposal.tokens.clamp(0, vocab_size - 1)
    return cut(replace(proposal, tokens=tokens), list(map(_room, rows)))


def cut(proposal: Proposal, most: Sequence[int]) -> Proposal:
    """Return the proposal with at most so many tokens per row."""
    num_tokens = tuple(map(min, proposal.num_tokens, most))
    width = max(num_tokens, default=0)
    fields = ("tokens", "draft_probs", *CERTAINTY)
    columns = {name: getattr(proposal, name) for name in fields}
    kept: dict[str, Any] = {
        name: None if value is None else value[:, :width] for name, value in columns.items()
    }
    return replace(proposal, num_tokens=num_tokens, **kept)
