"""`Request`: what the facade keeps of one request while the loop runs, and its result."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hybrid.decode.stopping import Decode, StopRule
from hybrid.errors import CapacityError, ConfigError
from hybrid.metrics import RowMeter
from hybrid.models.tokenizer import Tokenizer
from hybrid.params import SamplingParams
from hybrid.prompts import to_token_ids
from hybrid.protocols import Backbone
from hybrid.streams import RandomStream
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


def start_request(
    backbone: Backbone,
    tokenizer: Tokenizer | None,
    prompt: Any,
    params: SamplingParams,
    *,
    index: int | None = None,
    wants_text: bool,
) -> Request:
    """Check a prompt and its parameters, and return a request that has not begun.

    Args:
        backbone: the model.
        tokenizer: None where prompts are token ids.
        prompt: see `HybridDecoder.generate`.
        params: sampling and stopping.
        index: place among several prompts; None for a lone one.
        wants_text: the text of each step is asked for, not only that of the result.

    Raises:
        CapacityError: prompt and answer do not fit the context.
        ConfigError: a bad prompt, or stop rules that this model does not know.
    """
    where = "prompt" if index is None else f"prompt {index}"
    ids = to_token_ids(prompt, tokenizer, backbone.vocab_size, where)
    limit = backbone.max_seq_len
    room = limit - len(ids)
    if params.max_new_tokens > room:
        fewer = f" or set max_new_tokens to at most {room}" if room > 0 else ""
        raise CapacityError(
            f"{where}: got {len(ids)} tokens and max_new_tokens {params.max_new_tokens}, "
            f"expected at most {limit} together (the model's context). Shorten the prompt{fewer}."
        )
    bad = next((t for t in params.stop_token_ids if t >= backbone.vocab_size), None)
    if bad is not None:
        raise ConfigError(f"stop_token_ids: got {bad}, expected ids below {backbone.vocab_size}.")
    if params.stop and tokenizer is None:
        raise ConfigError("stop: this model has no tokenizer; use stop_token_ids.")
    decode = tokenizer.decode if tokenizer is not None else None
    seed = secrets.randbits(63) if params.seed is None else params.seed
    row = index or 0
    state = SequenceState(row, ids, len(ids), params, RandomStream(seed))
    rule = StopRule(params, backbone.eos_token_ids, decode if wants_text or params.stop else None)
    return Request(state, rule, RowMeter(row, len(ids)), decode)
