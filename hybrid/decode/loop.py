"""The loop around the step: admit requests, prefill, step until every row ended, clean up.

Next: hybrid/decoder.py.
"""

from __future__ import annotations

import time
from collections.abc import Generator

import torch

from hybrid.attention.pattern import causal
from hybrid.decode.commit import commit_row
from hybrid.decode.fallback import absorb_or_nothing, empty_proposal, reset_or_nothing
from hybrid.decode.judging import bar, judge_draft
from hybrid.decode.step import Engine, decode_step, keep_taps
from hybrid.protocols import ForwardOutput
from hybrid.types import Mode, Route, SequenceState, StepRecord, Write


def run(engine: Engine, rows: list[SequenceState]) -> Generator[StepRecord, None, None]:
    """Generate for all rows; yield one record per step.

    Closing the iterator (or any error) frees the cache rows and leaves the parts usable.
    """
    reset_or_nothing(engine)
    try:
        taps: dict[int, list[torch.Tensor]] = {}
        alive = []
        for row in rows:
            record, hidden = prefill(engine, row)
            if row.finish_reason is None:
                alive.append(row)
                for layer, value in hidden.items():
                    taps.setdefault(layer, []).append(value)
            yield record
        engine.rows = alive
        engine.hidden = {layer: torch.cat(values) for layer, values in taps.items()}
        while engine.rows:
            yield decode_step(engine)
    finally:
        for row in rows:
            engine.cache.free(row.row)
        engine.rows, engine.hidden, engine.slots = [], {}, {}


def prefill(engine: Engine, row: SequenceState) -> tuple[StepRecord, dict[int, torch.Tensor]]:
    """Run the prompt of one row and commit the first token.

    Rows are prefilled one by one: each has its own length, and none may depend on the others.

    Returns:
        The record, and the taps of the last prompt token {layer: [1, C]}.
    """
    started = time.perf_counter()
    prompt = torch.tensor([row.tokens], device=engine.backbone.device)
    num_forwards = 0
    out = ForwardOutput(None)
    size = engine.backbone.prefill_chunk
    wants_all = hasattr(engine.drafter, "absorb")
    for start in range(0, prompt.shape[1], size):
        chunk = prompt[:, start : start + size]
        is_last = start + chunk.shape[1] == prompt.shape[1]
        out = engine.backbone.forward(
            chunk,
            torch.arange(start, start + chunk.shape[1], device=chunk.device)[None],
            causal([start], chunk.shape[1]),
            engine.cache,
            [row.row],
            write=Write.COMMIT,
            num_logits=1 if is_last else 0,
            taps=engine.drafter.taps if is_last or wants_all else (),
        )
        num_forwards += 1
        absorb_or_nothing(engine, [row.row], out.hidden, [chunk.shape[1]])
    logits = bar(engine, out)
    forwarded = time.perf_counter()
    # The step's own verdict and commit, with nothing drafted.
    engine.rows = [row]
    proposal = empty_proposal(1)
    judged = judge_draft(engine, logits, proposal, proposal, (Route(0),))
    row_step = commit_row(engine, 0, judged, logits)
    keep_taps(engine, {}, (0,))
    record = StepRecord(
        mode=Mode.PREFILL,
        rows=(row_step,),
        num_verify_forwards=num_forwards,
        width=prompt.shape[1],
        forward_seconds=forwarded - started,
        seconds=time.perf_counter() - started,
    )
    engine.history.append(record)
    return record, {layer: value[:, -1] for layer, value in out.hidden.items()}
