"""A decoder that answers from a script: what the command line sees of `HybridDecoder`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hybrid.errors import CapacityError
from hybrid.metrics import RowMeter
from hybrid.params import SamplingParams
from hybrid.strategy import VERIFIED, Strategy, resolve
from hybrid.types import (
    Context,
    GenerationResult,
    Mode,
    RowStep,
    Slot,
    Source,
    StepRecord,
    StreamEvent,
)

_V, _C, _A = Source.DRAFT_VERIFIED, Source.CORRECTION, Source.AR
HELLO = (
    (("Hello", _A),),
    ((" brave", _V), (" new", _V), (" **world**", _C)),
    ((", it", _V), (" works", Source.BONUS)),
    ((".", Source.DIFFUSION_ONLY),),
)
WORDS = ("one ", "two ", "three ", "four")


class FakeDecoder:
    """Streams `script` (a list of steps, each a list of (text, source)) for any prompt.

    Args:
        script: the answer; its first step is the prefill.
        delay: seconds before each step.
        max_seq_len: context; a chat message costs as many tokens as it has words.
        error: raised before the step of that index, {index: exception}.
    """

    strategies = VERIFIED
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
        self.backbone: Any = SimpleNamespace(
            max_seq_len=max_seq_len,
            default_strategy="speculative",
            can_verify=True,
            context=Context.CAUSAL,
            mask_token_id=None,
            logit_shift=1,
        )
        self.tokenizer = SimpleNamespace(
            has_chat_template=has_chat_template,
            chat=lambda messages: [1] * sum(len(m["content"].split()) for m in messages),
            decode=lambda ids: "".join(WORDS[i] for i in ids),
        )
        self.requests: list[tuple[Any, SamplingParams, Strategy]] = []
        self.num_closed = 0

    def resolve_strategy(
        self, strategy: str | Strategy | None = None, *, allow_unverified: bool = False
    ) -> Strategy:
        """Return what a request decodes with, as the real decoder does."""
        return resolve(strategy, self.backbone, unverified=allow_unverified)

    def generate(self, prompt: Any, params: Any = None, **how: Any) -> GenerationResult:
        """Return the last event's result."""
        result = [event.result for event in self.stream(prompt, params, **how)][-1]
        assert result is not None
        return result

    def stream(
        self,
        prompt: Any,
        params: Any = None,
        *,
        strategy: str | Strategy | None = None,
        record: Path | None = None,
        allow_unverified: bool = False,
    ) -> Iterator[StreamEvent]:
        """Yield one event per step of the script."""
        chosen = self.resolve_strategy(strategy, allow_unverified=allow_unverified)
        self.requests.append((prompt, params, chosen))
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


class DenoisingDecoder(FakeDecoder):
    """Writes `WORDS` as one block, out of order; token i is word i."""

    strategies = ("llada", "fast-dllm")
    order = ((2, 0.3), (0, 0.9), (3, 0.6), (1, 0.99))

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.backbone.default_strategy, self.backbone.can_verify = "llada", False
        self.backbone.context, self.backbone.mask_token_id = Context.BIDIRECTIONAL, 9

    def _events(self, prompt: Any) -> Iterator[StreamEvent]:
        num_prompt = len(self.tokenizer.chat(prompt)) if isinstance(prompt, list) else 1
        meter, filled, num_final = RowMeter(0, num_prompt), dict[int, float](), 0
        for slot, confidence in self.order:
            time.sleep(self.delay)
            filled[slot] = confidence
            begin = num_final
            while num_final in filled:
                num_final += 1
            is_last = num_final == len(WORDS)
            slots = tuple(
                Slot(num_prompt + i, i if i in filled else None, filled.get(i, 0.0))
                for i in range(len(WORDS))
            )
            pieces = tuple((word, Source.DIFFUSION_ONLY) for word in WORDS[begin:num_final])
            row = RowStep(
                index=0,
                tokens=tuple(range(begin, num_final)),
                sources=tuple(source for _, source in pieces),
                slots=slots,
                finish_reason="length" if is_last else None,
            )
            record = StepRecord(
                Mode.DIFFUSION, (row,), num_verify_forwards=0, num_denoise_forwards=1
            )
            meter.add(record)
            result = None
            if is_last:
                ids = tuple(range(len(WORDS)))
                result = GenerationResult("".join(WORDS), ids, "length", stats=meter.stats())
            yield StreamEvent("".join(word for word, _ in pieces), pieces, record, result)
