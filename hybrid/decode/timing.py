"""How long passes take here: what the router's cost model is fitted on before the first step.

Next: hybrid/router/cost.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import cast

import torch
from torch import Tensor

from hybrid.attention.pattern import causal
from hybrid.params import SamplingParams
from hybrid.protocols import Backbone, CarryingDrafter, Drafter, DraftState, can_carry
from hybrid.sampling import argmax
from hybrid.streams import RandomStream
from hybrid.transfer import decides_on_device, read
from hybrid.types import Mode, Plan, SequenceState, Write

# Long enough that attention counts, short enough for the smallest context.
_PREFIX = 64
_LEAST_LOOK_MS = 1e-3  # of a look that is lost in the noise of the clock


class PassTimer:
    """Runs passes over a short random text and tells the milliseconds; nothing of it is kept."""

    def __init__(self, backbone: Backbone, drafter: Drafter, *, num_runs: int = 3) -> None:
        """Keep the parts.

        Args:
            backbone: the target.
            drafter: of the draft passes.
            num_runs: of each pass; the median counts, and one more warms up.
        """
        self._backbone, self._drafter, self._num_runs = backbone, drafter, num_runs

    def target_ms(
        self, num_rows: int, num_tokens: int, points: int = 0, num_slots: int = 0
    ) -> float:
        """Return the time of a target pass, the choice of tokens included.

        Args:
            num_rows: rows of the batch.
            num_tokens: of each row, the anchor's among them.
            points: groups of slots that each row carries; where they stand costs nothing.
            num_slots: tokens that each group drafts.
        """
        state = self._state(num_rows, num_tokens + points * (num_slots + 1))
        run = self._target_pass(state, num_tokens, points, num_slots)
        return self._time(lambda: run().tolist())  # the device has to be done

    def draft_ms(self, num_rows: int, num_tokens: int) -> float:
        """Return the time of a draft of so many tokens per row."""
        state = self._state(num_rows, num_tokens + 1)
        plan = Plan(Mode.SPECULATIVE, num_tokens)
        return self._time(lambda: self._drafter.draft(state, plan).tokens.tolist())

    def look_ms(self, num_rows: int, num_tokens: int) -> float:
        """Return what it costs to read how sure a draft is before its target pass is on its way.

        0 where the host decides: it has the draft anyway. Elsewhere it is more: with the look and
        without take turns, and the median of their differences counts.
        """
        if not decides_on_device(self._backbone.device):
            return 0.0
        state = replace(self._state(num_rows, num_tokens + 1), wants_features=True)
        judge = self._target_pass(state, num_tokens + 1)
        plan = Plan(Mode.SPECULATIVE, num_tokens)
        if self._drafter.draft(state, plan).confidence is None:
            return 0.0  # there is nothing to look at

        def run(*, looks: bool) -> None:
            known = self._drafter.draft(state, plan).confidence
            if looks and known is not None:
                read({"confidence": known})
            judge().tolist()

        for _ in range(2):  # the first compiles the pass, the second records it
            run(looks=True)
        differences = []
        for _ in range(2 * self._num_runs + 1):
            took = [_seconds(partial(run, looks=looks)) for looks in (True, False)]
            differences.append(took[0] - took[1])
        return max(1000 * median(differences), _LEAST_LOOK_MS)

    def _target_pass(
        self, state: DraftState, num_tokens: int, points: int = 0, num_slots: int = 0
    ) -> Callable[[], Tensor]:
        """Return what runs a target pass and chooses its tokens; see `target_ms`."""
        backbone, num_rows = self._backbone, len(state.rows)
        inputs = torch.ones(num_rows, num_tokens, dtype=torch.long, device=backbone.device)
        starts = [row.cached_len for row in state.rows]
        positions = torch.tensor(starts, device=backbone.device)[:, None] + torch.arange(
            num_tokens, device=backbone.device
        )
        carried = None
        if points and can_carry(self._drafter):
            drafter = cast(CarryingDrafter, self._drafter)
            groups = tuple(min(j, num_tokens - 1) for j in range(points))
            carried = drafter.carry(state, inputs, [groups] * num_rows, num_slots)

        def run() -> Tensor:
            out = backbone.forward(
                inputs,
                positions,
                causal(starts, num_tokens),
                state.cache,
                [row.row for row in state.rows],
                taps=self._drafter.taps,
                carried=carried,
            )
            assert out.logits is not None
            return argmax(out.logits)

        return run

    def _state(self, num_rows: int, width: int) -> DraftState:
        """Return rows with a cached text, and scratch for `width` tokens."""
        backbone = self._backbone
        length = min(_PREFIX, backbone.max_seq_len // 2, backbone.prefill_chunk)
        draw = torch.Generator().manual_seed(0)
        text = torch.randint(backbone.vocab_size, (num_rows, length + 1), generator=draw)
        cache = backbone.new_cache(num_rows, length + width)
        out = backbone.forward(
            text[:, :length].to(backbone.device),
            torch.arange(length, device=backbone.device).expand(num_rows, -1),
            causal([0] * num_rows, length),
            cache,
            range(num_rows),
            write=Write.COMMIT,
            num_logits=0,
            taps=self._drafter.taps,
        )
        absorb = getattr(self._drafter, "absorb", None)
        if absorb is not None:
            absorb(cache, range(num_rows), out.hidden, [length] * num_rows)
        rows = [
            SequenceState(index, tokens, 1, SamplingParams(), RandomStream(0))
            for index, tokens in enumerate(text.tolist())
        ]
        hidden = {layer: values[:, -1] for layer, values in out.hidden.items()}
        return DraftState(rows, cache, hidden)

    def _time(self, run: Callable[[], object]) -> float:
        run()
        return 1000 * median(_seconds(run) for _ in range(self._num_runs))


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
