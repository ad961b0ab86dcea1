"""Drafters that are right or wrong on purpose, random, broken or dishonest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hybrid.protocols import Drafter, DraftState
from hybrid.sampling import sample
from hybrid.types import Plan, Proposal, SequenceState, StepRecord


class FakeDrafter:
    """Proposes `guess(row, k)` for each row: a point mass."""

    name = "fake"
    taps: tuple[int, ...] = ()

    def __init__(self, max_draft_tokens: int = 4) -> None:
        self.max_draft_tokens = max_draft_tokens
        self.observed: list[StepRecord] = []
        self.num_resets = self.num_drafts = 0

    def guess(self, row: SequenceState, count: int) -> list[int]:
        raise NotImplementedError

    def draft(self, state: DraftState, plan: Plan) -> Proposal:
        self.num_drafts += 1
        drafts = [self.guess(row, plan.num_draft_tokens) for row in state.rows]
        width = max(map(len, drafts))
        # Padding that no backbone could embed: it must not matter.
        tokens = torch.tensor([d + [-7] * (width - len(d)) for d in drafts], dtype=torch.long)
        return Proposal(tokens.view(len(drafts), width), tuple(map(len, drafts)))

    def observe(self, record: StepRecord) -> None:
        self.observed.append(record)

    def reset(self) -> None:
        self.num_resets += 1


class Oracle(FakeDrafter):
    """Knows whole sequences (prompt and answer); right except where `wrong(index)` says so."""

    name = "oracle"
    vocab_size = 64

    def __init__(
        self,
        sequences: Sequence[Sequence[int]],
        max_draft_tokens: int,
        wrong: Callable[[int], bool] = lambda index: False,
        *,
        is_ragged: bool = False,
    ) -> None:
        super().__init__(max_draft_tokens)
        self.sequences, self.wrong, self.is_ragged = sequences, wrong, is_ragged

    def guess(self, row: SequenceState, count: int) -> list[int]:
        at = len(row.tokens)
        known = next((s for s in self.sequences if list(s[:at]) == row.tokens), [])
        if self.is_ragged:
            count = (7 * at) % (count + 1)
        truth = (list(known[at:]) + [0] * count)[:count]
        return [(t + self.wrong(at + i)) % self.vocab_size for i, t in enumerate(truth)]


def always_right(sequences: Sequence[Sequence[int]], count: int) -> Oracle:
    return Oracle(sequences, count)


def always_wrong(sequences: Sequence[Sequence[int]], count: int) -> Oracle:
    return Oracle(sequences, count, lambda index: True)


def sometimes_wrong(sequences: Sequence[Sequence[int]], count: int) -> Oracle:
    """Wrong at every third position, with a different number of tokens each time, at times none."""
    return Oracle(sequences, count, lambda index: index % 3 == 0, is_ragged=True)


class UniformDrafter(FakeDrafter):
    """Draws each token uniformly with the row's stream and reports that law."""

    name = "uniform"

    def __init__(self, vocab_size: int, max_draft_tokens: int = 3) -> None:
        super().__init__(max_draft_tokens)
        self.vocab_size = vocab_size

    def draft(self, state: DraftState, plan: Plan) -> Proposal:
        batch, width = len(state.rows), plan.num_draft_tokens
        rows = [
            [int(row.stream.uniform() * self.vocab_size) for _ in range(width)]
            for row in state.rows
        ]
        laws = torch.full((batch, width, self.vocab_size), 1 / self.vocab_size)
        return Proposal(torch.tensor(rows), (width,) * batch, draft_probs=laws)


class SkewedDrafter(FakeDrafter):
    """Draws from a random law of the last token, far from the target's; each row by itself."""

    name = "skewed"

    def __init__(self, vocab_size: int, max_draft_tokens: int = 3) -> None:
        super().__init__(max_draft_tokens)
        generator = torch.Generator().manual_seed(99)
        logits = 2 * torch.randn(vocab_size, vocab_size, generator=generator)
        self.laws = torch.softmax(logits, dim=-1)

    def draft(self, state: DraftState, plan: Plan) -> Proposal:
        tokens, laws = [], []
        for row in state.rows:
            last, own = row.anchor, []
            for _ in range(plan.num_draft_tokens):
                laws.append(self.laws[last])
                last = sample(laws[-1], row.stream)
                own.append(last)
            tokens.append(own)
        batch, width = len(tokens), plan.num_draft_tokens
        probs = torch.stack(laws).view(batch, width, -1)
        return Proposal(torch.tensor(tokens), (width,) * batch, draft_probs=probs)


class RaisingDrafter(FakeDrafter):
    """Raises `error` in every step, or hands over to `inner` in all but each `every`th."""

    name = "raising"

    def __init__(self, error: BaseException, inner: Drafter | None = None, every: int = 1) -> None:
        super().__init__(4 if inner is None else inner.max_draft_tokens)
        self.error, self.inner, self.every = error, inner, every

    def draft(self, state: DraftState, plan: Plan) -> Proposal:
        self.num_drafts += 1
        if self.inner is None or self.num_drafts % self.every == 0:
            raise self.error
        return self.inner.draft(state, plan)


class GarbageDrafter(FakeDrafter):
    """Returns whatever `make(batch, k)` returns."""

    name = "garbage"

    def __init__(self, make: Callable[[int, int], Any]) -> None:
        super().__init__(4)
        self.make = make

    def draft(self, state: DraftState, plan: Plan) -> Proposal:
        return self.make(len(state.rows), plan.num_draft_tokens)
