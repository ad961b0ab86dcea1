"""`Trace`: what one engine accepted of the same drafts, and how two engines differ.

Next: hybrid/pair/engines.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from hybrid.metrics import acceptance_by_position

Steps = Sequence[Sequence[Sequence[int]]]
# Float32 rounds differently from engine to engine, so a near tie of the drafter may fall otherwise.
SIMILAR = 0.1


@dataclass(frozen=True, slots=True)
class Trace:
    """Greedy decoding of some prompts in one engine, end tokens ignored.

    Attributes:
        engine: its name and version.
        steps: for each prompt the tokens that each pass of the target committed; the prefill, which
            commits the first token, comes first.
        num_draft_tokens: K.
    """

    engine: str
    steps: Steps
    num_draft_tokens: int

    @property
    def histogram(self) -> list[int]:
        """How many passes accepted 0 ... K drafted tokens, those that `whole_passes` keeps."""
        counts = [0] * (self.num_draft_tokens + 1)
        for answer in self.steps:
            for _, tokens in self.whole_passes(answer):
                counts[len(tokens) - 1] += 1
        return counts

    def whole_passes(self, answer: Sequence[Sequence[int]]) -> Iterator[tuple[int, Sequence[int]]]:
        """Return (tokens before it, tokens of it) of the passes that no limit can have cut short.

        Those near the limit are left out, cut or not: engines cut at other places. So is the
        prefill, which had no draft.
        """
        limit = sum(len(tokens) for tokens in answer)
        starts = accumulate(len(tokens) for tokens in answer)
        for start, tokens in zip(starts, answer[1:], strict=False):
            if start + self.num_draft_tokens + 1 <= limit:
                yield start, tokens

    @property
    def acceptance_length(self) -> float:
        """Tokens per pass of the target, the next token included; 0 where no pass was counted."""
        counts = self.histogram
        total = sum(counts)
        return 1 + sum(n * count for n, count in enumerate(counts)) / total if total else 0.0

    @property
    def by_position(self) -> list[float]:
        """Share of the passes that accepted at least 1 ... K drafted tokens."""
        return acceptance_by_position(self.histogram, self.num_draft_tokens)

    def same_tokens(self, other: Trace) -> bool:
        """Return whether the answers are the same, token for token."""
        return [_tokens(steps) for steps in self.steps] == [_tokens(s) for s in other.steps]


def similar(ours: Trace, other: Trace) -> bool:
    """Return whether two engines accept the same but for near ties."""
    return abs(ours.acceptance_length - other.acceptance_length) <= SIMILAR * max(
        ours.acceptance_length, other.acceptance_length
    )


def first_difference(ours: Trace, other: Trace) -> str | None:
    """Return, in words, the first place where two engines differ; None where they do not.

    Either the target's own tokens differ, or how much of a draft was accepted behind equal tokens.
    """
    for index, (a, b) in enumerate(zip(ours.steps, other.steps, strict=True)):
        text_a, text_b = _tokens(a), _tokens(b)
        at = next((i for i, (x, y) in enumerate(zip(text_a, text_b, strict=False)) if x != y), None)
        if at is not None:
            return (
                f"prompt {index}, token {at}: {ours.engine} says {text_a[at]}, {other.engine} "
                f"{text_b[at]}: the targets themselves differ, whatever is drafted"
            )
        for (start, x), (_, y) in zip(ours.whole_passes(a), other.whole_passes(b), strict=False):
            if len(x) != len(y):
                return (
                    f"prompt {index}, token {start}: of the draft there {ours.engine} accepts "
                    f"{len(x) - 1} tokens, {other.engine} {len(y) - 1}"
                )
    return None


def _tokens(steps: Sequence[Sequence[int]]) -> list[int]:
    return [token for step in steps for token in step]
