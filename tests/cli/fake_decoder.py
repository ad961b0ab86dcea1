"""A decoder that answers from a script: what the command line sees of `HybridDecoder`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from hybrid.errors import CapacityError, ConfigError, did_you_mean
from hybrid.metrics import RowMeter
from hybrid.params import SamplingParams
from hybrid.types import GenerationResult, Mode, RowStep, Source, StepRecord, StreamEvent

_V, _C, _A = Source.DRAFT_VERIFIED, Source.CORRECTION, Source.AR
HELLO = (
    (("Hello", _A),),
    ((" brave", _V), (" new", _V), (" **world**", _C)),
    ((", it", _V), (" works", Source.BONUS)),
    ((".", Source.DIFFUSION_ONLY),),
)


class FakeDecoder:
    """Streams `script` (a list of steps, each a list of (text, source)) for any prompt.

    Args:
        script: the answer; its first step is the prefill.
        delay: seconds before each step.
        max_seq_len: context; a chat message costs as many tokens as it has words.
        error: raised before the step of that index, {index: exception}.
    """

    strategies = ("ar", "speculative", "ngram", "auto")
    model_name, drafter_name, verifier_name = "fake", "self-diffusion", "greedy"

    def __init__(
        self,
        script: Any = HELLO,
        delay: float = 0.0,
        max_seq_len: int = 1000,
        error: dict[int, BaseException] | None = None,
        has_chat_template: bool = True,
    ) -> None:
        self.script, self.delay, self.error = script, delay, error or {}
        self.backbone = SimpleNamespace(max_seq_len=max_seq_len)
        self.tokenizer = SimpleNamespace(
            has_chat_template=has_chat_template,
            chat=lambda messages: [1] * sum(len(m["content"].split()) for m in messages),
        )
        self.requests: list[tuple[Any, SamplingParams, str]] = []
        self.num_closed = 0

    def generate(
        self, prompt: Any, params: Any = None, *, strategy: str = "speculative"
    ) -> GenerationResult:
        """Return the last event's result."""
        result = [event.result for event in self.stream(prompt, params, strategy=strategy)][-1]
        assert result is not None
        return result

    def stream(
        self, prompt: Any, params: Any = None, *, strategy: str = "speculative"
    ) -> Iterator[StreamEvent]:
        """Yield one event per step of the script."""
        if strategy not in self.strategies:
            hint = did_you_mean(strategy, self.strategies)
            raise ConfigError(f"Unknown strategy {strategy!r}.{hint}")
        self.requests.append((prompt, params, strategy))
        return self._events(prompt)

    def _events(self, prompt: Any) -> Iterator[StreamEvent]:
        num_prompt = len(self.tokenizer.chat(prompt)) if isinstance(prompt, list) else 1
        if num_prompt >= self.backbone.max_seq_len:
            raise CapacityError(
                f"The prompt has {num_prompt} tokens, the context {self.backbone.max_seq_len}."
            )
        meter = RowMeter(0, num_prompt)
        text, ids = "", []
        try:
            for i, step in enumerate(self.script):
                time.sleep(self.delay)
                if i in self.error:
                    raise self.error[i]
                is_last = i == len(self.script) - 1
                ids += range(len(ids), len(ids) + len(step))
                text += "".join(piece for piece, _ in step)
                row = RowStep(
                    index=0,
                    tokens=tuple(range(len(step))),
                    sources=tuple(source for _, source in step),
                    num_drafted=4 if i else 0,
                    num_accepted=sum(source is _V for _, source in step),
                    finish_reason="stop" if is_last else None,
                )
                record = StepRecord(
                    mode=Mode.SPECULATIVE if i else Mode.PREFILL,
                    rows=(row,),
                    num_draft_forwards=1 if i else 0,
                    seconds=0.1,
                )
                meter.add(record)
                result = None
                if is_last:
                    result = GenerationResult(text, tuple(ids), "stop", stats=meter.stats())
                yield StreamEvent("".join(p for p, _ in step), tuple(step), record, result)
        finally:
            self.num_closed += 1

    def plan_memory(self, max_seq_len: int | None = None, batch: int = 1) -> dict[str, int]:
        """Return made-up sizes that depend on the arguments."""
        cache = (max_seq_len or self.backbone.max_seq_len) * batch * 2**10
        return {"weights": 2**20, "kv_cache": cache, "total": 2**20 + cache}
