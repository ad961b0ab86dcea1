"""N-gram lookup and self-diffusion side by side: each row takes what promises more tokens per time.

A lookup costs nothing and pays where the answer repeats its context; a draft pass pays elsewhere.
What each is worth is learned while decoding, row by row. Next: drafters/self_diffusion.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hybrid.carried import Carried, KeptSlots
from hybrid.decode.fallback import empty_proposal
from hybrid.drafters.ngram import find_continuation
from hybrid.drafters.self_diffusion import SelfDiffusionDrafter
from hybrid.models.adapter import DiffusionAdapter
from hybrid.protocols import Backbone, DraftState
from hybrid.transfer import send, take_rows
from hybrid.types import Plan, Proposal, RowStep, SequenceState, StepRecord

# How often a copied token was right by the length of the match, 1 to 6: greedy answers of the
# default model to 400 of its adapter's training prompts. A match of six is nearly a promise, a
# match of one is a guess.
COPY_PRIORS = (0.2, 0.51, 0.65, 0.7, 0.75, 0.9)
# The same for a masked slot: an acceptance length near 2 with three slots.
DIFFUSION_PRIOR = 0.55
# On the same answers a prior worth eight events predicted best. The memory holds twenty: enough to
# overrule it, and prediction does not suffer.
_DECAY, _PRIOR_WEIGHT = 0.95, 8.0


class Belief:
    """A running mean that starts from a prior and forgets."""

    def __init__(self, prior: float) -> None:
        """Start from `prior`."""
        self._prior, self._total, self._count = prior, 0.0, 0.0

    @property
    def mean(self) -> float:
        """What to expect now."""
        return (self._total + _PRIOR_WEIGHT * self._prior) / (self._count + _PRIOR_WEIGHT)

    def add(self, total: float, count: int = 1) -> None:
        """Learn from `count` events that add up to `total`."""
        if count:
            self._total = _DECAY * self._total + total
            self._count = _DECAY * self._count + count

    def add_draft(self, num_accepted: int, num_judged: int) -> None:
        """Learn the odds of one token from a draft: it is judged up to the first rejection."""
        self.add(num_accepted, num_accepted + (num_accepted < num_judged))


@dataclass(slots=True)
class _Row:
    """The odds of one row: of a masked slot, and of a copied token by the length of the match."""

    diffusion: Belief = field(default_factory=lambda: Belief(DIFFUSION_PRIOR))
    copies: tuple[Belief, ...] = field(
        default_factory=lambda: tuple(Belief(prior) for prior in COPY_PRIORS)
    )


@dataclass(frozen=True, slots=True)
class _Copy:
    """What lookup has for a row: the tokens after the match, none where nothing matches."""

    tokens: list[int]
    match_length: int


class CombinedDrafter:
    """Takes each row's draft from n-gram lookup or self-diffusion, by expected tokens per time.

    A source whose every token is accepted with odds p commits 1 + p + ... + p^n tokens per step
    with n tokens. The time of a step is one verify pass, plus a draft pass for self-diffusion. The
    pass runs for the rows that want it alone, and not at all when none does.

    A row decides from its own text and its own odds. Lookups are scored in every step, taken or
    not, since the committed tokens tell; slots are scored only where they were this row's draft,
    even when a pass ran for others. The cost of a draft pass, in verify passes, is the share of the
    layers it runs at first. Greedy rows then take the measured one, of all rows together: it may
    change a greedy row's draft, never its tokens. A sampled row's random stream follows its drafts,
    so its cost stays as it is, and neither the clock nor the batch can change its sample.
    """

    name = "combined"
    _rows: dict[int, _Row]
    _copies: dict[int, _Copy]  # what lookup had for each row of the step
    _has_slots: set[int]  # the rows that took slots instead

    def __init__(
        self, backbone: Backbone, adapter: DiffusionAdapter, *, stops_early: bool = True
    ) -> None:
        """Keep the parts; `num_draft_tokens` bounds either source.

        Args:
            backbone: the target.
            adapter: what self-diffusion needs, bound to the backbone.
            stops_early: see `SelfDiffusionDrafter`.
        """
        self._diffusion = SelfDiffusionDrafter(backbone, adapter, stops_early=stops_early)
        self.taps = self._diffusion.taps
        self.max_draft_tokens = self._diffusion.max_draft_tokens
        self.preferred_draft_tokens = self._diffusion.preferred_draft_tokens
        self.can_carry = self._diffusion.can_carry
        self.max_slots = self._diffusion.max_slots
        config = adapter.config
        self._prior_cost = config.num_passes * (1 - config.entry_layer / backbone.num_layers)
        # Elsewhere a pass returns before it has run, so its time is not in the record.
        self._is_timed = backbone.device.type == "cpu"
        self.reset()

    def draft(self, state: DraftState, plan: Plan) -> Proposal:
        """Propose K tokens per row by diffusion, or up to K that are copied."""
        rows = state.rows
        limit = min(plan.num_draft_tokens, self.max_draft_tokens)
        copies = [_look_up(row.tokens, limit) for row in rows]
        wanting = [
            b
            for b, row in enumerate(rows)
            if not self._prefers_copy(row, copies[b], limit, state.slots.get(row.row))
        ]
        drafted = empty_proposal(0)
        if wanting:
            hidden = take_rows(state.hidden, wanting)
            some = replace(state, rows=[rows[b] for b in wanting], hidden=hidden)
            drafted = self._diffusion.draft(some, plan)
        self._copies = {row.row: copy for row, copy in zip(rows, copies, strict=True)}
        self._has_slots = {rows[b].row for b in wanting}
        return _merge([copy.tokens for copy in copies], wanting, drafted)

    def carry(
        self,
        state: DraftState,
        tokens: Tensor,
        points: Sequence[Sequence[int]],
        num_slots: int,
    ) -> Carried:
        """Let the next draft ride in a target pass; see `CarryingDrafter.carry`."""
        return self._diffusion.carry(state, tokens, points, num_slots)

    def observe(self, record: StepRecord) -> None:
        """Learn each row's odds, and what a draft pass costs here."""
        is_whole = record.num_drafting == len(record.rows)  # the pass was for all of them
        if self._is_timed and is_whole and record.forward_seconds > 0:
            self._pass_cost.add(record.draft_seconds / record.forward_seconds)
        for row in record.rows:
            copy = self._copies.get(row.index)
            if copy is None:  # a step without a draft
                continue
            odds = self._odds(row.index)
            if copy.tokens:
                num_right = _num_equal(copy.tokens, row.tokens)
                num_judged = min(len(copy.tokens), len(row.tokens))
                odds.copies[copy.match_length - 1].add_draft(num_right, num_judged)
            if row.index in self._has_slots:
                odds.diffusion.add_draft(_num_agreed(row), row.num_drafted)
        self._copies, self._has_slots = {}, set()

    def reset(self) -> None:
        """Return to the priors."""
        self._rows, self._copies, self._has_slots = {}, {}, set()
        self._pass_cost = Belief(self._prior_cost)

    def _odds(self, row: int) -> _Row:
        return self._rows.setdefault(row, _Row())

    def _prefers_copy(
        self, row: SequenceState, copy: _Copy, limit: int, carried: KeptSlots | None
    ) -> bool:
        if not copy.tokens:
            return False
        odds = self._odds(row.row)
        cost, num_slots = 0.0, limit
        if carried is not None:  # these slots cost nothing more
            num_slots = min(limit, len(carried.hidden))
        else:
            cost = self._pass_cost.mean if row.sampling.is_greedy else self._prior_cost
        copied = _expected_tokens(odds.copies[copy.match_length - 1].mean, len(copy.tokens))
        return copied >= _expected_tokens(odds.diffusion.mean, num_slots) / (1 + cost)


def _num_agreed(row: RowStep) -> int:
    """Return how many leading tokens the target agreed with, be they verified or not."""
    doubts = enumerate(row.disagreements)
    return next((i for i, doubt in doubts if doubt >= 0.5), row.num_accepted)


def _expected_tokens(odds: float, num_drafted: int) -> float:
    """Return the expected number of committed tokens, the next token included."""
    return sum(odds**i for i in range(num_drafted + 1))


def _look_up(tokens: list[int], limit: int) -> _Copy:
    longest = len(COPY_PRIORS)
    start = find_continuation(tokens, longest, 1)
    matched, suffix = tokens[max(start - longest, 0) : start][::-1], tokens[-longest:][::-1]
    return _Copy(tokens[start : start + limit], _num_equal(matched, suffix))


def _num_equal(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many leading items are equal."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def _merge(copies: Sequence[list[int]], wanting: Sequence[int], drafted: Proposal) -> Proposal:
    """Return one proposal of all rows: copies, and where a row is `wanting` what was drafted."""
    drafts = [[] if b in wanting else copy for b, copy in enumerate(copies)]
    num_tokens, first_slot = [len(draft) for draft in drafts], [0] * len(drafts)
    firsts = drafted.first_slot or (0,) * len(wanting)
    for b, count, first in zip(wanting, drafted.num_tokens, firsts, strict=True):
        num_tokens[b], first_slot[b] = count, first
    num_slots, device = drafted.tokens.shape[1], drafted.tokens.device
    width, slotted = max(num_slots, *num_tokens), send(wanting, device)
    padded = [draft + [0] * (width - len(draft)) for draft in drafts]
    tokens = send(padded, device).view(len(drafts), width)
    tokens[slotted, :num_slots] = drafted.tokens

    def spread(values: Tensor | None) -> Tensor | None:
        """Return [B, K] of all rows: nobody knows how sure a copy is."""
        if values is None:
            return None
        whole = torch.full(tokens.shape, math.nan, device=device)
        whole[slotted, :num_slots] = values
        return whole

    laws = None
    if drafted.draft_probs is not None:
        # A copied token was not drawn: its law is a point.
        laws = torch.zeros(*tokens.shape, drafted.draft_probs.shape[2], device=device)
        laws.scatter_(2, tokens[..., None], 1.0)
        laws[slotted, :num_slots] = drafted.draft_probs
    return Proposal(
        tokens,
        tuple(num_tokens),
        laws,
        entropy=spread(drafted.entropy),
        confidence=spread(drafted.confidence),
        margin=spread(drafted.margin),
        first_slot=tuple(first_slot),
        num_forwards=drafted.num_forwards,
        num_drafting=drafted.num_drafting,
    )
