"""The denoising loop: every masked-diffusion preset runs here. It knows the contracts only.

Each active row plans one pass; rows whose passes have the same shape share a forward. A row's
tokens never depend on the other rows. Next: drafters/denoise/presets.py.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hybrid.attention.pattern import AttentionPattern, bidirectional
from hybrid.decode.canvas import Block, Canvas, Pass, PassKind
from hybrid.decode.policies import DenoisePreset, Denoiser
from hybrid.decode.slots import DeviceSlots, Slots
from hybrid.decode.stopping import StopRule
from hybrid.params import SamplingParams
from hybrid.protocols import Backbone, Cache
from hybrid.transfer import decides_on_device
from hybrid.types import Mode, RowStep, SequenceState, Slot, Source, StepRecord

_MODES = {
    PassKind.PREFILL: Mode.PREFILL,
    PassKind.DENOISE: Mode.DIFFUSION,
    PassKind.COMMIT: Mode.AR,
}


@dataclass(slots=True)
class DenoiseRow:
    """One row: its request, its canvas, its policies and its stop rule.

    `sampling` is the request's, with the system's own truncation where it asks for none.
    """

    state: SequenceState
    canvas: Canvas
    denoiser: Denoiser
    rule: StopRule
    sampling: SamplingParams

    @classmethod
    def start(
        cls, backbone: Backbone, preset: DenoisePreset, state: SequenceState, rule: StopRule
    ) -> DenoiseRow:
        """Begin a row: nothing of its answer is known.

        Raises:
            ConfigError: the preset's parameters do not fit the model or each other.
        """
        num_prompt, limit = len(state.tokens), state.sampling.max_new_tokens
        denoiser = preset.start(backbone, num_prompt, limit)
        assert backbone.mask_token_id is not None
        canvas = Canvas(state.tokens, denoiser.schedule.length, backbone.mask_token_id)
        sampling = preset.sampling(state.sampling)
        if denoiser.top_k and not sampling.top_k:
            sampling = sampling.replace(top_k=denoiser.top_k)
        return cls(state, canvas, denoiser, rule, sampling)


@dataclass(slots=True)
class _Job:
    """What one row does in the next pass."""

    row: DenoiseRow
    blocks: Sequence[Block]
    plan: Pass

    @property
    def shape(self) -> tuple[str, str, int, float]:
        """Jobs of one shape share a forward."""
        plan = self.plan
        return plan.kind.value, plan.write.value, len(plan.positions), self.row.denoiser.guidance


def denoise(
    backbone: Backbone, cache: Cache, rows: Sequence[DenoiseRow], *, view: bool = False
) -> Generator[StepRecord, None, None]:
    """Generate for all rows; yield one record per forward.

    Closing the iterator (or any error) frees the cache rows.

    Args:
        backbone: the model; it has a mask token.
        cache: `Denoiser.copies` rows per request.
        rows: one per request.
        view: records hold the slots that are being worked on, for somebody who watches.
    """
    active = list(rows)
    try:
        while active:
            jobs, ended = [], []
            for row in active:
                blocks = row.denoiser.schedule.open(row.canvas)
                if blocks:
                    jobs.append(_Job(row, blocks, row.denoiser.cache.plan(row.canvas, blocks)))
                else:
                    ended.append(row)
            if ended:
                yield _end(ended)
            for _, group in groupby(sorted(jobs, key=lambda j: j.shape), key=lambda j: j.shape):
                yield _step(backbone, cache, list(group), view=view)
            active = [job.row for job in jobs if job.row.state.finish_reason is None]
    finally:
        for index in range(len(cache.lengths)):
            cache.free(index)


@torch.inference_mode()
def _step(backbone: Backbone, cache: Cache, jobs: list[_Job], *, view: bool) -> StepRecord:
    """Run one forward for jobs of one shape, and commit what their rules choose."""
    started = time.perf_counter()
    logits = _forward(backbone, cache, jobs)
    forwarded = time.perf_counter()
    steps = []
    guessed = iter(logits[len(jobs) :])
    for job, own in zip(jobs, logits, strict=False):
        blocks = _advance(job, own, [next(guessed) for _ in job.plan.guesses])
        steps.append(_emit(job.row, blocks if view else ()))
    kind = jobs[0].plan.kind
    return StepRecord(
        mode=_MODES[kind],
        rows=tuple(steps),
        num_denoise_forwards=int(kind == PassKind.DENOISE),
        num_verify_forwards=int(kind != PassKind.DENOISE),
        width=len(jobs[0].plan.positions),
        forward_seconds=forwarded - started,
        seconds=time.perf_counter() - started,
    )


def _advance(job: _Job, logits: Tensor, guessed: Sequence[Tensor]) -> Sequence[Block]:
    """Commit what a pass predicts, and go on for as long as a guess has come true.

    Args:
        job: the row and its pass.
        logits: [n, V] of the pass.
        guessed: the same of its guesses.

    Returns:
        The blocks of the last commit.
    """
    row, blocks, plan = job.row, job.blocks, job.plan
    while True:
        _commit(row, blocks, plan, logits)
        reached = [n for n, g in enumerate(job.plan.guesses) if g.canvas.equals(row.canvas)]
        if not reached:
            return blocks
        blocks = row.denoiser.schedule.open(row.canvas)
        plan, logits = job.plan.guesses[reached[0]].plan, guessed[reached[0]]


def _commit(row: DenoiseRow, blocks: Sequence[Block], plan: Pass, logits: Tensor) -> None:
    """Commit what the row's rule chooses of the predictions of one pass, logits [n, V]."""
    canvas, denoiser = row.canvas, row.denoiser
    kind = DeviceSlots if decides_on_device(logits.device) else Slots
    slots = kind(
        logits[: len(plan.targets)],
        plan.targets,
        sampling=row.sampling,
        stream=row.state.stream,
        masked=canvas.masked[plan.targets] if plan.rewrites else None,
        current=canvas.tokens[plan.targets] if plan.rewrites else None,
        raw_confidence=denoiser.raw_confidence,
    )
    index = denoiser.rule.choose(slots, blocks)
    canvas.commit(plan.targets[index], slots.tokens_at(index), slots.confidence[index])


def _fed(jobs: Sequence[_Job], num_requests: int) -> list[tuple[Canvas, Pass, int]]:
    """Return what a forward is fed, with the cache row of each: all jobs, then their guesses."""
    fed = [(job.row.canvas, job.plan, job.row.state.row) for job in jobs]
    for job in jobs:
        for copy, guess in enumerate(job.plan.guesses, start=1):
            fed.append((guess.canvas, guess.plan, job.row.state.row + copy * num_requests))
    return fed


def _forward(backbone: Backbone, cache: Cache, jobs: Sequence[_Job]) -> Tensor:
    """Return the targets' logits [B, n, V] of `_fed`, the mask token's at -inf."""
    guidance, device = jobs[0].row.denoiser.guidance, backbone.device
    fed = _fed(jobs, len(cache.lengths) // jobs[0].row.denoiser.copies)
    plans, rows = [plan for _, plan, _ in fed], [row for _, _, row in fed]
    tokens = _stacked([canvas.tokens[plan.positions] for canvas, plan, _ in fed])
    positions = _stacked([plan.positions for plan in plans])
    at = _stacked([plan.rows for plan in plans])
    prefixes = [plan.prefix for plan in plans]
    local = [plan.local for plan in plans]
    features = [job.plan.features for job in jobs if job.plan.features is not None]
    if guidance:
        blind = tokens.clone()
        for own, job in zip(blind, jobs, strict=True):
            own[job.plan.positions < job.row.canvas.num_prompt] = backbone.mask_token_id
        tokens, positions, at = torch.cat([tokens, blind]), positions.repeat(2, 1), at.repeat(2, 1)
        rows = rows + [row + len(cache.lengths) // 2 for row in rows]
        prefixes, local = prefixes * 2, local * 2
    for row, prefix in zip(rows, prefixes, strict=True):
        cache.truncate(row, prefix)
    out = backbone.forward(
        tokens.to(device, non_blocking=True),
        positions.to(device, non_blocking=True),
        _pattern(prefixes, local, jobs[0].plan),
        cache,
        rows,
        write=jobs[0].plan.write,
        logits_at=at.to(device, non_blocking=True),
        features=features or None,
    )
    for row, plan in zip(rows, plans * (2 if guidance else 1), strict=True):
        cache.commit(row, plan.num_kept)
    assert out.logits is not None
    logits = out.logits
    if guidance:
        given, blind_logits = logits.chunk(2)
        logits = blind_logits + (guidance + 1) * (given - blind_logits)
    # No answer. Finite in float32 too, so that probability 0 times it is 0, not NaN.
    least = max(torch.finfo(dtype).min for dtype in (logits.dtype, torch.float32))
    logits[..., backbone.mask_token_id] = least
    return logits


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    """Return rows [n] as [B, n], shorter ones with zeros behind them."""
    return rows[0][None] if len(rows) == 1 else pad_sequence(list(rows), batch_first=True)


def _pattern(
    prefixes: Sequence[int], local: Sequence[Tensor | None], plan: Pass
) -> AttentionPattern:
    width = len(plan.positions)
    if plan.is_causal:
        return AttentionPattern(
            tuple(prefixes), torch.ones(width, width, dtype=torch.bool).tril_(), is_causal=True
        )
    if all(own is None for own in local):
        return bidirectional(prefixes, width)
    full = torch.ones(width, width, dtype=torch.bool)
    masks = [full if own is None else own for own in local]
    return AttentionPattern(tuple(prefixes), torch.stack(masks))


def _emit(row: DenoiseRow, blocks: Sequence[Block]) -> RowStep:
    """Hand out the tokens that are final now, up to where a stop rule ends the row."""
    state, canvas = row.state, row.canvas
    end = row.denoiser.schedule.stable_end(canvas)
    emitted: list[int] = []
    for token in canvas.tokens[len(state.tokens) : end].tolist():
        emitted.append(token)
        state.finish_reason = row.rule.push(token)
        if state.finish_reason is not None:
            break
    state.tokens.extend(emitted)
    return RowStep(
        mode=Mode.DIFFUSION,
        index=state.row,
        tokens=tuple(emitted),
        sources=(Source.DIFFUSION_ONLY,) * len(emitted),
        slots=_view(canvas, blocks),
        finish_reason=state.finish_reason,
    )


def _view(canvas: Canvas, blocks: Sequence[Block]) -> tuple[Slot, ...]:
    """Return the slots that are being worked on, as a reader may show them."""
    if not blocks:
        return ()
    start, end = blocks[0].start, blocks[-1].end
    shown = zip(
        canvas.tokens[start:end].tolist(),
        canvas.masked[start:end].tolist(),
        canvas.confidence[start:end].tolist(),
        strict=True,
    )
    return tuple(
        Slot(start + i, None if masked else token, 0.0 if masked else sure)
        for i, (token, masked, sure) in enumerate(shown)
    )


def _end(rows: Sequence[DenoiseRow]) -> StepRecord:
    """Hand out what complete canvases still hold. No pass ran."""
    steps = []
    for row in rows:
        step = _emit(row, ())
        row.state.finish_reason = row.state.finish_reason or "length"
        steps.append(
            RowStep(step.index, step.tokens, step.sources, finish_reason=row.state.finish_reason)
        )
    return StepRecord(Mode.DIFFUSION, tuple(steps), num_verify_forwards=0, width=0)
