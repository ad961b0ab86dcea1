"""Decode many requests, a batch at a time: a row that ends makes room for the next request.

`HybridDecoder.generate` decodes a batch until its last row ended and gives all rows one seed; for
thousands of answers of different lengths this is faster, and each has random numbers of its own.
It is the engine's own prefill and step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from hybrid import registry
from hybrid.decode.loop import prefill
from hybrid.decode.step import Engine, decode_step
from hybrid.decode.stopping import StopRule
from hybrid.decoder import HybridDecoder
from hybrid.memory import require_memory
from hybrid.router.fixed import FixedRouter
from hybrid.types import SequenceState


def decode_in_order(
    decoder: HybridDecoder,
    requests: Iterable[SequenceState],
    *,
    batch: int,
    max_seq_len: int,
    is_greedy: bool,
) -> Iterator[SequenceState]:
    """Yield each request when it has ended, in the order in which they came.

    Decodes token by token (strategy "ar"). Answers do not depend on `batch` where a row's bits do
    not depend on the others: bfloat16 and int4 on a CPU, see docs/architecture.md.

    Args:
        decoder: model and tokenizer.
        requests: taken when there is room; `row` is set here.
        batch: rows decoded together.
        max_seq_len: of the longest request, prompt and answer together.
        is_greedy: of all requests.

    Raises:
        CapacityError: the cache does not fit the memory.
    """
    backbone = decoder.backbone
    num_bytes = backbone.cache_nbytes(batch, max_seq_len + 1)
    require_memory(num_bytes, backbone.device, f"The KV cache for {batch} x {max_seq_len} tokens")
    engine = Engine(
        backbone,
        backbone.new_cache(batch, max_seq_len + 1),
        registry.load("drafter", "none")(),
        registry.load("verifier", "greedy" if is_greedy else "rejection")(),
        FixedRouter(0),
    )
    waiting, free, started = iter(requests), list(range(batch)), deque[SequenceState]()
    while True:
        while free and (request := next(waiting, None)) is not None:
            request.row = free.pop()
            started.append(request)
            engine.rules[request.row] = StopRule(request.sampling, backbone.eos_token_ids)
            others = engine.rows
            prefill(engine, request)
            _release(engine, [request], free)
            engine.rows = others + engine.rows
            yield from _first_ended(started)
        if not engine.rows:
            return
        rows = engine.rows
        decode_step(engine)
        _release(engine, rows, free)
        engine.history.clear()  # nothing reads it, and it would grow for hours
        yield from _first_ended(started)


def _first_ended(started: deque[SequenceState]) -> Iterator[SequenceState]:
    while started and started[0].finish_reason is not None:
        yield started.popleft()


def _release(engine: Engine, rows: Iterable[SequenceState], free: list[int]) -> None:
    """Give back the cache rows of those that ended."""
    for request in rows:
        if request.finish_reason is not None:
            engine.cache.free(request.row)
            free.append(request.row)
