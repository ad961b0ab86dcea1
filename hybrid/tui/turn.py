"""`Turn`: one answer while it grows, built from stream events. Next: hybrid/tui/render.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hybrid.metrics import RowMeter
from hybrid.types import GenerationResult, Mode, Slot, Source, Stats, StepRecord, StreamEvent


@dataclass
class Turn:
    """What is known of the current answer.

    Attributes:
        strategy: name of what the decoder runs.
        max_seq_len: context window of the model, tokens.
        num_prompt_tokens: tokens of the conversation so far.
        decode: from token ids to text, for slots whose text is not final yet.
        pieces: (text, source) in order.
        steps: the records so far.
        result: set by the last event.
    """

    strategy: str
    max_seq_len: int = 0
    num_prompt_tokens: int = 0
    decode: Callable[[Sequence[int]], str] | None = None
    pieces: list[tuple[str, Source]] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    result: GenerationResult | None = None

    def __post_init__(self) -> None:
        """Start the clock."""
        self._meter = RowMeter(0, self.num_prompt_tokens)
        self._texts: dict[int, str] = {}

    def add(self, event: StreamEvent) -> None:
        """Take in one event."""
        self.pieces.extend(event.pieces)
        self.steps.append(event.record)
        self._meter.add(event.record)
        self.result = event.result or self.result

    @property
    def is_complete(self) -> bool:
        """Whether the model ended the answer (not Ctrl-C, not an error)."""
        return self.result is not None

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(piece for piece, _ in self.pieces)

    @property
    def mode(self) -> Mode:
        """What the last step did."""
        return self.steps[-1].mode if self.steps else Mode.PREFILL

    @property
    def slots(self) -> tuple[Slot, ...]:
        """What is being denoised behind the final tokens."""
        rows = self.steps[-1].rows if self.steps else ()
        behind = self.num_context_tokens
        return tuple(slot for row in rows for slot in row.slots if slot.position >= behind)

    def text_of(self, token: int) -> str:
        """Return the text of a token by itself; special tokens have none."""
        if token not in self._texts:
            self._texts[token] = self.decode([token]) if self.decode else ""
        return self._texts[token]

    @property
    def num_new_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(len(row.tokens) for step in self.steps for row in step.rows)

    @property
    def num_context_tokens(self) -> int:
        """Tokens of the context window in use."""
        return self.num_prompt_tokens + self.num_new_tokens

    @property
    def stats(self) -> Stats:
        """The numbers so far; the result's own once there is one."""
        return self.result.stats if self.result else self._meter.stats()
