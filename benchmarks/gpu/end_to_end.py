"""Whole passes and steps on random weights: speed only. What is accepted is forced, never measured.

Next: benchmarks/gpu/exact.py.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.random_models import NUM_SLOTS, adapter_of, backbone_of, shapes
from benchmarks.gpu.session import SEED, Session
from benchmarks.gpu.timing import quantiles, synchronize, wall_ms
from hybrid.attention.pattern import causal
from hybrid.decode.timing import PassTimer
from hybrid.decoder import HybridDecoder
from hybrid.drafters.self_diffusion import SelfDiffusionDrafter
from hybrid.models.transformer import NativeBackbone
from hybrid.sampling import argmax
from hybrid.strategy import Strategy
from hybrid.transfer import DeviceVerdict, send
from hybrid.types import Write

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
NUM_DRAFTED = NUM_SLOTS - 1  # of a carried group the first slot falls to the target
LENGTHS = tuple(range(1, NUM_DRAFTED + 2))  # acceptance lengths: the next token is counted
MODES = ("two-pass", "fused", "one-pass")


@dataclass(frozen=True)
class Scale:
    """How much is decoded: a context, and steps of which the first are not counted."""

    context: int
    num_steps: int
    num_warm_up: int
    widths: tuple[int, ...]
    lengths: tuple[int, ...]


SCALE = Scale(1024, 24, 6, WIDTHS, LENGTHS)
DRY_SCALE = Scale(24, 4, 2, (1, 3), (1, 8))


class ForcedVerifier:
    """Accepts a fixed number of tokens, whatever they are; as the greedy one it reads nothing."""

    name = "forced"
    lossless = False

    def __init__(self, num_accepted: int) -> None:
        """Take the number."""
        self.num_accepted = num_accepted

    def verify(self, target_logits: Any, proposal: Any, *_: Any) -> DeviceVerdict:
        """Accept them where as many were drafted, and go on with the target's argmax."""
        choices = argmax(target_logits)  # [B, K+1]
        counts = send([min(self.num_accepted, n) for n in proposal.num_tokens], choices.device)
        return DeviceVerdict(counts, choices.gather(1, counts[:, None])[:, 0])


def run(session: Session) -> None:
    """Measure every model with CUDA graphs and without; a model is told when it is made."""
    scale = DRY_SCALE if session.is_dry else SCALE
    runs = [(name, graphs) for graphs in (True, False) for name in shapes(session.is_dry)]
    for name, graphs in session.in_time(runs, lambda run: f"{run[0]}, CUDA graphs {run[1]}"):
        with graphs_set(graphs):
            spec = shapes(session.is_dry)[name]
            backbone = backbone_of(spec, session.generator(), session.dtype)
            _measure(session, scale, backbone, {"model": name, "graphs": graphs})
            del backbone
            release(session.device)


def _measure(
    session: Session, scale: Scale, backbone: NativeBackbone, what: dict[str, Any]
) -> None:
    def name(measure: Callable[..., Any]) -> str:
        return f"{measure.__name__} of {what['model']}, CUDA graphs {what['graphs']}"

    for measure in session.in_time(MEASURES, name):
        for record in measure(backbone, scale):
            session.add(**what, speed_only=True, **record)


@contextmanager
def graphs_set(enabled: bool) -> Iterator[None]:
    """Allow or forbid CUDA graphs inside the block."""
    before = os.environ.get("HYBRID_CUDA_GRAPHS")
    os.environ["HYBRID_CUDA_GRAPHS"] = str(int(enabled))
    try:
        yield
    finally:
        os.environ.pop("HYBRID_CUDA_GRAPHS")
        if before is not None:
            os.environ["HYBRID_CUDA_GRAPHS"] = before


def release(device: torch.device) -> None:
    """Give back what a model has held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def random_ids(backbone: NativeBackbone, count: int) -> list[int]:
    """Return the ids of a prompt."""
    draw = torch.Generator().manual_seed(SEED)
    return torch.randint(backbone.vocab_size, (count,), generator=draw).tolist()


def prefilled(backbone: NativeBackbone, context: int, room: int) -> Any:
    """Return a cache of one row that holds `context` tokens, with room for more."""
    cache = backbone.new_cache(1, context + room)
    ids = torch.tensor([random_ids(backbone, context)], device=backbone.device)
    for start in range(0, context, backbone.prefill_chunk):
        chunk = ids[:, start : start + backbone.prefill_chunk]
        positions = torch.arange(start, start + chunk.shape[1], device=backbone.device)[None]
        backbone.forward(
            chunk, positions, causal([start], chunk.shape[1]), cache, [0],
            write=Write.COMMIT, num_logits=0,
        )  # fmt: skip
    return cache


def verify_pass(backbone: NativeBackbone, cache: Any, ids: Sequence[int]) -> Callable[[], Any]:
    """Return a call that runs the tokens behind what is cached, and leaves the cache as it was."""
    start, width = cache.lengths[0], len(ids)
    inputs = torch.tensor([list(ids)], device=backbone.device)
    positions = torch.arange(start, start + width, device=backbone.device)[None]
    pattern = causal([start], width)
    return lambda: backbone.forward(inputs, positions, pattern, cache, [0])


def bytes_read(backbone: NativeBackbone, context: int) -> dict[str, int]:
    """Return the bytes that a pass of one token cannot do without: weights, and the cached K/V.

    Of an embedding that is not the head one row is read.
    """
    weights = backbone.weight_nbytes
    if not backbone.spec.tie_embeddings:
        weights -= backbone.embedding.numel() * backbone.embedding.element_size()
    s = backbone.spec
    per_token = 2 * s.num_layers * s.num_kv_heads * s.head_dim * backbone.dtype.itemsize
    return {"weight_bytes": weights, "kv_bytes": context * per_token}


def measure_passes(backbone: NativeBackbone, scale: Scale) -> Iterator[dict[str, Any]]:
    """Time passes of T tokens with logits for all of them."""
    cache = prefilled(backbone, scale.context, max(scale.widths))
    for width in scale.widths:
        call = verify_pass(backbone, cache, random_ids(backbone, width))
        times = quantiles(wall_ms(call, backbone.device))
        yield {
            "kind": "pass",
            "width": width,
            "context": scale.context,
            "ms": times,
            **bytes_read(backbone, scale.context),
        }


def measure_steps(backbone: NativeBackbone, scale: Scale) -> Iterator[dict[str, Any]]:
    """Time AR steps, and steps that accept as many tokens as they are told to."""
    found = time_steps(HybridDecoder(backbone), "ar", scale, 1)
    yield {"mode": "ar", "drafted": 0, **found, **bytes_read(backbone, scale.context)}
    generator = torch.Generator(backbone.device).manual_seed(SEED)
    adapter = adapter_of(backbone, generator)
    for mode in MODES:
        strategy = Strategy.preset("speculative", mode=mode)
        for length in scale.lengths:
            decoder = HybridDecoder(
                backbone,
                adapter=adapter,
                drafter="self-diffusion",
                verifier=ForcedVerifier(length - 1),
                num_draft_tokens=NUM_DRAFTED,
            )
            found = time_steps(decoder, strategy, scale, length)
            yield {"mode": mode, "drafted": NUM_DRAFTED, **found}


def time_steps(
    decoder: HybridDecoder, strategy: str | Strategy, scale: Scale, length: int
) -> dict[str, Any]:
    """Return a step's milliseconds, and its draft passes; it ends when its tokens are known.

    Raises:
        RuntimeError: a step gave another number of tokens than it was told to.
    """
    prompt = random_ids(decoder.backbone, scale.context)  # type: ignore[arg-type]
    wanted = (scale.num_steps + 1) * length + 1
    steps = decoder.stream(prompt, strategy=strategy, temperature=0.0, max_new_tokens=wanted)
    times: list[float] = []
    draft_passes: list[int] = []
    try:
        next(steps)  # the prefill
        for index in range(scale.num_steps):
            started = time.perf_counter()
            record = next(steps).record
            times.append(1e3 * (time.perf_counter() - started))
            draft_passes.append(record.num_draft_forwards)
            (row,) = record.rows
            if len(row.tokens) != length and index >= scale.num_warm_up:
                raise RuntimeError(f"step {index}: {len(row.tokens)} tokens, expected {length}")
    finally:
        steps.close()
        synchronize(decoder.backbone.device)
    counted = slice(scale.num_warm_up, None)
    return {
        "kind": "step",
        "acceptance_length": length,
        "ms": quantiles(times[counted]),
        "draft_passes": sum(draft_passes[counted]) / len(draft_passes[counted]),
    }


def measure_looks(backbone: NativeBackbone, scale: Scale) -> Iterator[dict[str, Any]]:
    """Time what the router pays to see a draft before it sends the target pass; see `PassTimer`."""
    adapter = adapter_of(backbone, torch.Generator(backbone.device).manual_seed(SEED))
    drafter = SelfDiffusionDrafter(backbone, adapter)
    timer = PassTimer(backbone, drafter, num_runs=scale.num_steps)
    yield {"kind": "look", "drafted": NUM_DRAFTED, "ms": timer.look_ms(1, NUM_DRAFTED)}


def measure_memory(backbone: NativeBackbone, scale: Scale) -> Iterator[dict[str, Any]]:
    """Compare the most memory that a generation held with what was planned."""
    device = backbone.device
    generator = torch.Generator(device).manual_seed(SEED)
    decoder = HybridDecoder(
        backbone,
        adapter=adapter_of(backbone, generator),
        drafter="self-diffusion",
        verifier=ForcedVerifier(NUM_DRAFTED // 2),
        num_draft_tokens=NUM_DRAFTED,
    )
    prompt, max_new_tokens = random_ids(backbone, scale.context), 4 * scale.num_steps
    planned = decoder.plan_memory(scale.context + max_new_tokens, 1)
    release(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    decoder.generate(prompt, strategy="speculative", max_new_tokens=max_new_tokens)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    yield {"kind": "memory", "peak_bytes": peak, "planned": planned, "context": scale.context}


MEASURES = (measure_passes, measure_steps, measure_looks, measure_memory)
