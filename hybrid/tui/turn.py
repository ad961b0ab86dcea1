"""`Turn`: one answer while it grows, built from stream events. Next: hybrid/tui/render.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybrid.metrics import RowMeter
from hybrid.types import GenerationResult, Mode, Source, Stats, StepRecord, StreamEvent


@dataclass
class Turn:
    """What is known of the current answer.

    Attributes:
        strategy: name passed to the decoder.
        max_seq_len: context window of the model, tokens.
        num_prompt_tokens: tokens of the conversation so far.
        pieces: (text, source) in order.
        steps: the records so far.
        result: set by the last event.
    """

    strategy: str
    max_seq_len: int = 0
    num_prompt_tokens: int = 0
    pieces: list[tuple[str, Source]] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    result: GenerationResult | None = None

    def __post_init__(self) -> None:
        """Start the clock."""
        self._meter = RowMeter(0, self.num_prompt_tokens)

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
