"""The loop of a model that decodes by its own code, a canvas at a time (DiffusionGemma).

Stop rules, limits and records are those of every other loop. Next: hybrid/decoder.py.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from typing import Any, Protocol

from hybrid.decode.stopping import StopRule
from hybrid.types import Mode, RowStep, SequenceState, Source, StepRecord


class DoneCanvas(Protocol):
    """A finished canvas: its ids, and the passes that it took."""

    @property
    def tokens(self) -> Sequence[int]:
        """Ids."""
        ...

    @property
    def num_steps(self) -> int:
        """Denoising passes."""
        ...


class CanvasModel(Protocol):
    """A model that yields the canvases of an answer, without end."""

    def canvases(
        self, prompt: Sequence[int], settings: Any, seed: int
    ) -> Generator[DoneCanvas, None, None]:
        """Yield them; an answer's random stream is its own."""
        ...


def decode_canvases(
    model: CanvasModel, rows: Sequence[tuple[SequenceState, StopRule]], settings: Any
) -> Generator[StepRecord, None, None]:
    """Generate for all rows, a canvas of each in turn; yield one record per canvas.

    Args:
        model: brings its own denoising loop.
        rows: of each request, with its stop rule.
        settings: of the model.
    """
    with ExitStack() as stack:
        active = [
            (
                state,
                rule,
                stack.enter_context(
                    closing(model.canvases(state.tokens, settings, state.stream.seed))
                ),
            )
            for state, rule in rows
        ]
        while active:
            for state, rule, canvases in active:
                started = time.perf_counter()
                canvas = next(canvases)
                seconds = time.perf_counter() - started
                yield StepRecord(
                    Mode.DIFFUSION,
                    (_emit(state, rule, canvas.tokens),),
                    num_verify_forwards=1,  # what precedes the canvas is encoded
                    num_denoise_forwards=canvas.num_steps,
                    width=len(canvas.tokens),
                    forward_seconds=seconds,
                    seconds=seconds,
                )
            active = [row for row in active if row[0].finish_reason is None]


def _emit(state: SequenceState, rule: StopRule, tokens: Sequence[int]) -> RowStep:
    """Hand out the tokens up to where a stop rule ends the row."""
    emitted: list[int] = []
    for token in tokens:
        emitted.append(token)
        state.finish_reason = rule.push(token)
        if state.finish_reason is not None:
            break
    state.tokens.extend(emitted)
    return RowStep(
        mode=Mode.DIFFUSION,
        index=state.row,
        tokens=tuple(emitted),
        sources=(Source.DIFFUSION_ONLY,) * len(emitted),
        finish_reason=state.finish_reason,
    )
