"""Decoding in which a target pass carries the next draft: routers, fakes and exact enumeration."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from diffusion_checkpoints import tiny_diffusion
from fakes import FakeDrafter, RandomTarget, make_engine
from torch import Tensor

from hybrid.attention.pattern import groups
from hybrid.decode.loop import prefill, run
from hybrid.decode.step import Engine
from hybrid.drafters.drawing import draw_tokens, take_numbers
from hybrid.drafters.self_diffusion import SelfDiffusionDrafter
from hybrid.models.checkpoint import open_checkpoint
from hybrid.models.draft_input import MASKED
from hybrid.models.families import spec_from_config
from hybrid.models.family_table import FAMILIES
from hybrid.models.name_maps import Renamed
from hybrid.models.transformer import NativeBackbone
from hybrid.params import SamplingParams
from hybrid.protocols import Carried, DraftState, ForwardOutput
from hybrid.router.fixed import FixedRouter
from hybrid.streams import RandomStream
from hybrid.types import (
    Mode,
    Plan,
    Proposal,
    Route,
    SequenceState,
    StepRecord,
)

# Routers


class RandomRouter:
    """Chooses at random for each step and each row, by the row's own text alone.

    Args:
        num_draft_tokens: K.
        seed: of the choices.
        floor: a draft is cut before the first token that is less sure; None cuts at random.
        max_unverified: the most tokens that are committed unverified in a step.
        always_draft: every row asks for K tokens in every step.
    """

    wants_features = True

    def __init__(
        self,
        num_draft_tokens: int,
        seed: int = 0,
        *,
        floor: float | None = None,
        max_unverified: int = 0,
        always_draft: bool = False,
    ) -> None:
        self.num_draft_tokens, self.seed, self.floor = num_draft_tokens, seed, floor
        self.max_unverified, self.always_draft = max_unverified, always_draft
        self.num_slots, self.max_points = num_draft_tokens + 1, num_draft_tokens + 1

    def draw(self, row: SequenceState, what: str) -> random.Random:
        return random.Random(f"{self.seed} {what} {row.row} {row.tokens}")

    def plan(
        self, rows: Sequence[SequenceState], history: Sequence[StepRecord]
    ) -> tuple[Plan, ...]:
        plans = []
        for row in rows:
            draw = self.draw(row, "plan")
            count = self.num_draft_tokens
            # A sampled row's draws must not depend on how many tokens the others ask for.
            if not self.always_draft:
                count = (
                    draw.choice([0, count]) if row.sampling.temperature else draw.randint(0, count)
                )
            may_draft = self.always_draft or draw.random() < 0.6
            plans.append(Plan(Mode.SPECULATIVE, count, may_draft, draw.random() < 0.8))
        return tuple(plans)

    def judge(
        self,
        rows: Sequence[SequenceState],
        proposal: Proposal,
        history: Sequence[StepRecord],
    ) -> tuple[Route, ...]:
        routes = []
        for b, (row, count) in enumerate(zip(rows, proposal.num_tokens, strict=True)):
            draw = self.draw(row, "judge")
            kept = draw.choice([count, draw.randint(0, count)])
            if self.floor is not None and proposal.confidence is not None:
                sure = proposal.confidence[b, :count].tolist()
                kept = next((i for i, p in enumerate(sure) if p < self.floor), count)
            points = [j for j in range(kept + 1) if draw.random() < 0.6]
            unverified = draw.randint(0, min(self.max_unverified, kept))
            routes.append(Route(kept, unverified, tuple(points)))
        return tuple(routes)


class RouterPerRow:
    """Gives each cache row a router of its own."""

    wants_features = False

    def __init__(self, routers: Mapping[int, FixedRouter]) -> None:
        self.routers = routers
        self.num_slots = max(router.num_slots for router in routers.values())
        self.max_points = max(router.max_points for router in routers.values())

    def plan(self, rows: Sequence[SequenceState], history: Any) -> tuple[Plan, ...]:
        return tuple(self.routers[row.row].plan([row], history)[0] for row in rows)

    def judge(
        self, rows: Sequence[SequenceState], proposal: Proposal, history: Any
    ) -> tuple[Route, ...]:
        counts = proposal.num_tokens
        return tuple(
            Route(n, 0, self.routers[row.row]._points(n))
            for row, n in zip(rows, counts, strict=True)
        )


# A target and a drafter that carry


class CarryingTarget(RandomTarget):
    """Logits and slots follow from the last three tokens. A slot's state says what it saw.

    The state is [those three tokens up to the anchor of its group, the slot's number].
    """

    hidden_size = 4

    def forward(self, *args: Any, carried: Carried | None = None, **kwargs: Any) -> ForwardOutput:
        out = super().forward(*args, **kwargs)
        if carried is None:
            return out
        _, _, pattern, cache, rows = args
        size, states = carried.group_size, []
        assert carried.pattern.num_tokens % size == 0
        for b, row in enumerate(rows):
            start, prefixes = cache.lengths[row], carried.pattern.prefix_len[b]
            assert start + pattern.num_tokens + carried.pattern.num_tokens <= cache.capacity
            for slot, (prefix, position) in enumerate(
                zip(prefixes, carried.position_ids[b].tolist(), strict=True)
            ):
                assert start <= prefix < start + pattern.num_tokens
                assert position == prefix + slot % size
                seen = cache.tokens[row][: prefix + 1]
                states.append([*context_of(seen), slot % size])
        hidden = torch.tensor(states, dtype=torch.float32).view(len(rows), -1, 4)
        return ForwardOutput(out.logits, out.hidden, hidden)


def context_of(tokens: Sequence[int]) -> list[int]:
    """Return the last three tokens, -1 where there are fewer."""
    return [-1, -1, -1, *tokens][-3:]


class CarryingFake(FakeDrafter):
    """Draws slot j behind an anchor from a law of the last three tokens and j."""

    name, can_carry = "carrying", True

    def __init__(self, vocab_size: int, num_draft_tokens: int, seed: int = 0) -> None:
        super().__init__(num_draft_tokens)
        self.vocab_size, self.seed, self.max_slots = vocab_size, seed, num_draft_tokens + 1

    def logits(self, state: Sequence[int]) -> Tensor:
        """Return [V] of a slot's state, see `CarryingTarget`."""
        draw = random.Random(f"{self.seed} {list(map(int, state))}")
        return torch.tensor([1.5 * draw.gauss(0, 1) for _ in range(self.vocab_size)])

    def draft(self, state: DraftState, plan: Plan) -> Proposal:
        count = min(plan.num_draft_tokens, self.max_draft_tokens)
        tokens = torch.zeros(len(state.rows), count, dtype=torch.long)
        laws = torch.zeros(len(state.rows), count, self.vocab_size)
        confidence = torch.zeros(len(state.rows), count)
        lengths, firsts = [], []
        for b, row in enumerate(state.rows):
            own = state.slots.get(row.row)
            fresh = [[*context_of(row.tokens), 1 + i] for i in range(count)]
            slots = fresh if own is None else own.hidden.tolist()[:count]
            for i, slot in enumerate(slots):
                logits, before = self.logits(slot), tokens[b : b + 1, :i]
                number = take_numbers([row], [1], tokens.device)[:, 0]
                drawn = draw_tokens(logits[None], [row], before, (), number)
                tokens[b, i], laws[b, i] = (own[0] for own in drawn)
                confidence[b, i] = logits.softmax(0).max()
            lengths.append(len(slots))
            firsts.append(1 if own is None else own.first_slot)
        num_drafting = sum(row.row not in state.slots for row in state.rows)
        return Proposal(
            tokens,
            tuple(lengths),
            laws,
            confidence=confidence,
            first_slot=tuple(firsts),
            num_forwards=int(num_drafting > 0),
            num_drafting=num_drafting,
        )

    def carry(
        self, state: DraftState, tokens: Tensor, points: Sequence[Sequence[int]], num_slots: int
    ) -> Carried:
        most, size = max(map(len, points)), min(num_slots, self.max_slots) + 1
        table = [[*own, *[0] * (most - len(own))] for own in points]
        starts = [
            [row.cached_len + j for j in own] for row, own in zip(state.rows, table, strict=True)
        ]
        positions = torch.tensor(starts)[..., None] + torch.arange(size)
        return Carried(
            layer=0,
            adapter=None,
            taps=(),
            inputs=lambda hidden, tensors: tensors[0],
            tensors=(tokens,),
            position_ids=positions.flatten(1),
            pattern=groups(starts, size),
            group_size=size,
            first_drafting=1,
        )


# Putting it together


@cache
def diffusion_backbone(
    case: str, dtype: torch.dtype = torch.float32, **fields: Any
) -> NativeBackbone:
    """Return a random model of a case of `CONFIGS` in tests/diffusion_checkpoints.py."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = open_checkpoint(tiny_diffusion(Path(folder), case, **fields))
        spec = spec_from_config(checkpoint.config)
        weights = Renamed(checkpoint.tensors, FAMILIES[spec.family].names)
        return NativeBackbone(spec, weights, dtype=dtype)


def carrying_engine(
    backbone: Any,
    drafter: Any,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    router: Any,
    *,
    verifier: str = "rejection",
) -> tuple[Engine, list[SequenceState]]:
    """Return an engine and its rows, not yet prefilled, with just enough cache."""
    several = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    engine, rows = make_engine(backbone, drafter, prompts, several[0], verifier=verifier)
    longest = max(len(p) + s.max_new_tokens for p, s in zip(prompts, several, strict=True))
    width = 1 + drafter.max_draft_tokens + router.max_points * (router.num_slots + 1)
    engine.cache, engine.router = backbone.new_cache(len(rows), longest + width), router
    for row, own in zip(rows, several, strict=True):
        row.sampling = own
        row.stream = RandomStream(own.seed or 0)
        engine.rules[row.row] = type(engine.rules[row.row])(own, backbone.eos_token_ids)
    return engine, rows


def decode(engine: Engine, rows: Sequence[SequenceState]) -> list[list[int]]:
    """Run to the end; return the new tokens of each row."""
    for _ in run(engine, list(rows)):
        pass
    return [row.tokens[row.num_prompt_tokens :] for row in rows]


# What slots must be


def prepared(
    drafter: Any, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> tuple[list[SequenceState], Any, dict[int, Tensor]]:
    engine, rows = make_engine(drafter._backbone, drafter, prompts, params, num_draft_tokens=200)
    taps = [prefill(engine, row)[1] for row in rows]
    return rows, engine.cache, {n: torch.cat([own[n] for own in taps]) for n in drafter.taps}


def ordinary_slots(
    drafter: SelfDiffusionDrafter,
    text: list[int],
    params: SamplingParams,
    count: int,
    *,
    zero: bool,
) -> Tensor:
    """Return [K, C] of a draft pass behind `text`, the last token of which is the anchor.

    With `zero`, features of layers that the pass does not run before it enters are zero.
    """
    rows, cached, hidden = prepared(drafter, [text[:-1]], params)
    rows[0].tokens[-1] = text[-1]
    entry = drafter._adapter.config.entry_layer
    if zero:
        hidden = {n: v * 0 if n >= entry else v for n, v in hidden.items()}
    known = torch.full((1, count), MASKED)
    return drafter._slots(DraftState(rows, cached, hidden), known)[0]
