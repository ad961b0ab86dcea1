"""Decoders whose drafts are often right, and made-up profiles for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from random import Random
from typing import Any

import pytest
import torch
from fakes import FakeDrafter, FakeTarget, RandomTarget
from mixed_modes import make

from hybrid import HybridDecoder, Strategy
from hybrid.protocols import DraftState
from hybrid.router.profile import Profile, Threshold
from hybrid.types import GenerationResult, Plan, Proposal

NEVER = 2.0  # no confidence is that high


def new_decoder(kind: str = "late", **fields: Any) -> HybridDecoder:
    """Return a decoder with a drafter of `mixed_modes.KINDS`; nothing of another call is in it."""
    drafter, backbone = make(kind)
    return HybridDecoder(backbone, drafter=drafter, **fields)


def threshold(value: float) -> Threshold:
    """Return a threshold with evidence that nobody has seen."""
    return Threshold(threshold=value, num_prompts=1, num_tokens=0, disagreements=0, p_value=1)


def made_up(
    decoder: HybridDecoder, *thresholds: float, risk: float = 0.1, **fields: Any
) -> Profile:
    """Return a profile that trusts what reaches the thresholds; nothing was calibrated."""
    settings, costs = decoder.routed(Strategy.preset("hybrid", cost="forwards"))
    model, adapter = decoder.identity()
    given = {
        "model": model,
        "adapter": adapter,
        "domain": "test",
        "risk": risk,
        "thresholds": tuple(map(threshold, thresholds)),
        "router": settings.model_dump(mode="json", exclude={"risk"}),
        "costs": costs.to_dict(),
    }
    return Profile(**(given | fields))


def told(result: GenerationResult) -> tuple[Any, ...]:
    """Return what a result says that neither the clock nor the batch may change."""
    stats = result.stats
    return (
        result.token_ids,
        result.sources,
        result.finish_reason,
        stats.num_unverified,
        round(stats.num_unverified_disagreeing, 4),  # rejection probabilities are rounded
        stats.acceptance_histogram,
    )


def answers(results: Sequence[GenerationResult]) -> list[list[int]]:
    return [list(result.token_ids) for result in results]


@contextmanager
def lying_clock(seed: int) -> Iterator[None]:
    """Let `time.perf_counter` tell made-up times, some steps a thousand times as long as others."""
    rng, ticks = Random(seed), count()
    now = [0.0]

    def perf_counter() -> float:
        next(ticks)
        now[0] += 10 ** rng.uniform(-6, 0)
        return now[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.perf_counter", perf_counter)
        yield


class ConfidentDrafter(FakeDrafter):
    """Says how sure it is of each token, and is right as often as that.

    What it drafts behind a text follows from the text alone.

    Args:
        target: whose argmax is right.
        confidences: one of them is drawn for each token.
        flattery: how much less often it is right than it says.
    """

    name = "confident"

    def __init__(
        self,
        target: FakeTarget,
        count: int = 4,
        confidences: Sequence[float] = (0.5, 0.99, 0.9999),
        flattery: float = 0.0,
    ) -> None:
        super().__init__(count)
        self.target, self.confidences, self.flattery = target, confidences, flattery

    def draft(self, state: DraftState, plan: Plan) -> Proposal:
        drawn = [self._draw(row.tokens, plan.num_draft_tokens) for row in state.rows]
        return Proposal(
            torch.tensor([[token for token, _ in own] for own in drawn]),
            tuple(map(len, drawn)),
            confidence=torch.tensor([[sure for _, sure in own] for own in drawn]),
            first_slot=(1,) * len(drawn),
            num_forwards=1,
            num_drafting=len(drawn),
        )

    def _draw(self, tokens: Sequence[int], count: int) -> list[tuple[int, float]]:
        text, found = list(tokens), []
        for _ in range(count):
            rng = Random(f"{text}")
            sure = rng.choice(self.confidences)
            logits = list(self.target.law(text))
            token = logits.index(max(logits))
            if rng.random() >= sure - self.flattery:
                token = (token + 1) % self.target.vocab_size
            text.append(token)
            found.append((token, sure))
        return found


def confident_decoder(**fields: Any) -> HybridDecoder:
    """Return a decoder of a fake target, with a `ConfidentDrafter`."""
    target = RandomTarget(16)
    return HybridDecoder(target, drafter=ConfidentDrafter(target, **fields))
