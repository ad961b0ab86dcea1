"""`Request`: what the facade keeps of one request while the loop runs, and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hybrid.decode.stopping import Decode, StopRule
from hybrid.metrics import RowMeter
from hybrid.types import GenerationResult, SequenceState, Source, StepRecord, StreamEvent


@dataclass(slots=True)
class Request:
    """One request: its row, its stop rule, its numbers and its text so far."""

    state: SequenceState
    rule: StopRule
    meter: RowMeter
    decode: Decode | None
    sources: list[Source] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[Mapping[int, float]] = field(default_factory=list)
    text: str = ""

    def add(self, record: StepRecord) -> StreamEvent | None:
        """Take in a step; return this request's event, None when it has no part in the step."""
        step = self.meter.add(record)
        if step is None:
            return None
        self.sources.extend(step.sources)
        self.logprobs.extend(step.logprobs)
        self.top_logprobs.extend(step.top_logprobs)
        pieces = tuple(
            (piece, source)
            for piece, source in zip(self.rule.take_pieces(), step.sources, strict=False)
            if piece
        )
        text = "".join(piece for piece, _ in pieces)
        self.text += text
        is_last = step.finish_reason is not None
        return StreamEvent(text, pieces, record, self.result() if is_last else None)

    def result(self) -> GenerationResult:
        """Return what was generated; "cancelled" if the row did not end by itself."""
        state = self.state
        tokens = tuple(state.tokens[state.num_prompt_tokens :])
        has_logprobs = state.sampling.logprobs is not None
        return GenerationResult(
            text=self._text(tokens),
            token_ids=tokens,
            finish_reason=state.finish_reason or "cancelled",
            sources=tuple(self.sources),
            logprobs=tuple(self.logprobs) if has_logprobs else None,
            top_logprobs=tuple(self.top_logprobs) if has_logprobs else None,
            stats=self.meter.stats(),
        )

    def _text(self, tokens: tuple[int, ...]) -> str:
        if self.rule.keeps_text:
            return self.text
        if self.decode is None:
            return ""
        # The text of a stop id is not part of the answer.
        return self.decode(tokens[:-1] if self.rule.is_stop_id(tokens[-1:]) else tokens)
