"""A machine without a model: what drafts cost and how often they are right is written down.

It keeps the rules of the decode step: what a pass carries, which slots are left, what is committed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hybrid.params import SamplingParams
from hybrid.router.cost import StepShape
from hybrid.streams import RandomStream
from hybrid.types import (
    Mode,
    Plan,
    Proposal,
    Route,
    RowStep,
    SequenceState,
    Source,
    StepRecord,
)

Guess = tuple[float, bool]
"""A drafted token: how sure the draft is, and whether the target agrees if it did before."""


def row(index: int = 0, max_new_tokens: int = 512, **sampling: Any) -> SequenceState:
    params = SamplingParams(max_new_tokens=max_new_tokens, **sampling)
    return SequenceState(index, [1, 2, 3], 3, params, RandomStream(0))


def hostile(rng: random.Random, slot: int) -> Guess:
    """Always sure, always wrong."""
    return 0.95, False


def honest(share: Sequence[float] = (0.75, 0.7, 0.68, 0.66, 0.65, 0.64, 0.63, 0.62)) -> Callable:
    """Calibrated confidences around the share of right tokens of each slot."""

    def draw(rng: random.Random, slot: int) -> Guess:
        mean = share[min(slot, len(share)) - 1]
        confidence = rng.betavariate(2 * mean, 2 * (1 - mean))
        return confidence, rng.random() < confidence

    return draw


def linear(
    target: float = 7.7, token: float = 1.13, draft: float = 4.4, group: float = 4.4
) -> Callable[[StepShape], float]:
    """Milliseconds of one row: 7.7 alone, 11.1 with three drafted tokens, 4.4 for a draft."""

    def ms(shape: StepShape) -> float:
        extra = shape.rows * shape.width - 1
        has_draft = draft if shape.drafting else 0.0
        return target + token * extra + group * shape.rows * shape.groups + has_draft

    return ms


@dataclass
class Machine:
    """Runs a router. `ms` are seconds of the clock, whatever the router believes.

    So is `look_ms`, which a step takes longer when the router looks at what was drafted.
    """

    router: Any
    rows: list[SequenceState]
    draw: Callable[[random.Random, int], Guess]
    ms: Callable[[StepShape], float]
    seed: int = 0
    noise: float = 0.0
    disagree: Callable[[random.Random, int], float] | None = None
    look_ms: float = 0.0
    history: list[StepRecord] = field(default_factory=list)
    plans: list[tuple[Plan, ...]] = field(default_factory=list)
    routes: list[tuple[Route, ...]] = field(default_factory=list)
    explanations: list[Any] = field(default_factory=list)
    slots: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # One stream per row, so that rows do not disturb each other.
        self.rngs = {r.row: random.Random(f"{self.seed} {r.row}") for r in self.rows}
        self.clock = random.Random(f"{self.seed} clock")
        self.active = list(self.rows)
        for r in self.rows:
            r.tokens.append(4)
            step = RowStep(r.row, (4,), (Source.AR,))
            self.history.append(StepRecord(Mode.PREFILL, (step,), width=3, seconds=0.1))

    def run(self, num_tokens: int) -> Machine:
        """Step until every row has as many tokens as it may, or `num_tokens`."""
        while self.active and min(r.num_new_tokens for r in self.active) < num_tokens:
            self.step()
        return self

    def step(self) -> None:
        rows = self.active
        plans = self.router.plan(rows, self.history)
        firsts, guesses = [], []
        for r, plan in zip(rows, plans, strict=True):
            first, count = self.slots.get(r.row, (0, 0)) if plan.may_reuse else (0, 0)
            if plan.num_draft_tokens == 0 or not (count or plan.may_draft):
                first, count = 0, 0
            elif count == 0:
                first, count = 1, plan.num_draft_tokens
            count = min(count, plan.num_draft_tokens)
            firsts.append(first if count else 0)
            guesses.append([self.draw(self.rngs[r.row], first + i) for i in range(count)])
        width = max(map(len, guesses))
        sure = torch.full((len(rows), width), float("nan"), dtype=torch.float64)
        for b, own in enumerate(guesses):
            sure[b, : len(own)] = torch.tensor([c for c, _ in own], dtype=torch.float64)
        drafting = sum(f == 1 for f in firsts)
        proposal = Proposal(
            torch.zeros(len(rows), width, dtype=torch.long),
            tuple(map(len, guesses)),
            confidence=sure,
            first_slot=tuple(firsts),
            num_forwards=int(drafting > 0),
            num_drafting=drafting,
        )
        routes = self.router.judge(rows, proposal, self.history)
        steps = [self._commit(*item) for item in zip(rows, firsts, guesses, routes, strict=True)]
        groups = max(len(route.points) for route in routes)
        fed = 1 + max(route.num_draft_tokens for route in routes)
        took = self.ms(StepShape(len(rows), fed, groups, drafting))
        if width and any(own.has_looked for own in getattr(self.router, "explanations", ())):
            took += self.look_ms
        took *= 1 + self.noise * self.clock.random()
        self.plans.append(plans)
        self.routes.append(routes)
        self.explanations.append(getattr(self.router, "explanations", ()))
        self.history.append(
            StepRecord(
                max((s.mode for s in steps), key=list(Mode).index),
                tuple(steps),
                num_draft_forwards=int(drafting > 0),
                num_drafting=drafting,
                width=fed,
                num_carried=groups * (self.router.num_slots + 1),
                seconds=took / 1000,
            )
        )
        self.active = [r for r in rows if r.finish_reason is None]

    def _commit(
        self, r: SequenceState, first: int, guesses: Sequence[Guess], route: Route
    ) -> RowStep:
        fed, sure = route.num_draft_tokens, route.num_unverified
        assert 0 <= sure <= fed <= len(guesses)
        accepted = sure
        while accepted < fed and guesses[accepted][1]:
            accepted += 1
        left = self.slots.pop(r.row, (0, 0))
        fitting = [j for j in route.points if j <= accepted]
        if fitting:
            left = 1, self.router.num_slots
            passed = accepted + 1 - fitting[-1]
        else:
            passed = accepted + 1
        if left[1] > passed:
            self.slots[r.row] = left[0] + passed, left[1] - passed
        room = r.sampling.max_new_tokens - r.num_new_tokens
        tokens = (5,) * min(accepted + 1, room)
        r.tokens.extend(tokens)
        if r.num_new_tokens >= r.sampling.max_new_tokens:
            r.finish_reason = "length"
            self.slots.pop(r.row, None)
        has_slots = self.slots.get(r.row, (0, 0))
        mode = Mode.SPECULATIVE if fed else Mode.AR
        if route.points:
            mode = Mode.FUSED if len(route.points) == 1 else Mode.ONE_PASS
        sources = [Source.DIFFUSION_ONLY] * sure + [Source.DRAFT_VERIFIED] * (accepted - sure)
        return RowStep(
            r.row,
            tokens,
            (*sources, Source.BONUS)[: len(tokens)],
            mode=Mode.DIFFUSION_ONLY if sure else mode,
            num_proposed=len(guesses),
            num_drafted=fed,
            num_accepted=accepted,
            num_unverified=sure,
            disagreements=tuple(float(not right) for _, right in guesses[:sure]),
            confidences=tuple(c for c, _ in guesses),
            first_slot=first,
            points=route.points,
            num_slots=has_slots[1],
            next_slot=has_slots[0],
            finish_reason=r.finish_reason,
        )

    @property
    def seconds(self) -> float:
        return sum(r.seconds for r in self.history if r.mode != Mode.PREFILL)

    @property
    def num_tokens(self) -> int:
        return sum(r.num_new_tokens - 1 for r in self.rows)

    def share(self, *modes: Mode, after: int = 0) -> float:
        steps = [r for r in self.history if r.mode != Mode.PREFILL][after:]
        return sum(r.mode in modes for r in steps) / len(steps)
