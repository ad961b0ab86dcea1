"""Measure candidates prompt by prompt in one process, so that noise hits all alike.

Every prompt goes through every candidate before the next prompt begins, and the order turns by one
each time. Next: hybrid/bench/report.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hybrid.bench.candidates import Answer, Candidate

WARM_UP_TOKENS = 16

Clock = Callable[[], float]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt through one candidate.

    Attributes:
        seconds: wall time of the whole call, prefill included.
    """

    answer: Answer
    seconds: float

    @property
    def seconds_per_token(self) -> float:
        """Wall time divided by the tokens generated."""
        return self.seconds / len(self.answer.tokens)


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """Return the items beginning with the one whose turn it is."""
    first = turn % len(items)
    return [*items[first:], *items[:first]]


def measure(
    candidates: Sequence[Candidate],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    progress: Callable[[int, int], None] | None = None,
    clock: Clock = time.perf_counter,
) -> dict[str, list[Sample]]:
    """Run every prompt through every candidate, after a warm-up.

    Args:
        candidates: with distinct names.
        prompts: token ids.
        max_new_tokens: of each answer.
        progress: called with (prompts done, prompts).
        clock: seconds.

    Returns:
        {candidate: one sample per prompt}.
    """
    for candidate in candidates:
        candidate.generate(prompts[0], min(max_new_tokens, WARM_UP_TOKENS))
    samples: dict[str, list[Sample]] = {candidate.name: [] for candidate in candidates}
    for index, prompt in enumerate(prompts):
        for candidate in rotated(candidates, index):
            started = clock()
            answer = candidate.generate(prompt, max_new_tokens)
            samples[candidate.name].append(Sample(answer, clock() - started))
        if progress is not None:
            progress(index + 1, len(prompts))
    return samples
