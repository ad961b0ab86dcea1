"""How long a forward takes by its number of rows, on this machine.

The numbers that decide how many tokens are worth drafting. Next: hybrid/cli/bench.py.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import median

import torch

from hybrid.attention.pattern import causal
from hybrid.bench.runner import Clock, rotated
from hybrid.errors import ConfigError
from hybrid.protocols import Backbone, Cache
from hybrid.types import Write

CONTEXT = 256
REPEATS = 21
_WARM_UP = 2


def time_widths(
    backbones: Mapping[str, Backbone],
    widths: Sequence[int],
    *,
    context: int = CONTEXT,
    repeats: int = REPEATS,
    clock: Clock = time.perf_counter,
) -> dict[str, dict[str, float]]:
    """Time verify passes of each width, all taking turns.

    Args:
        backbones: name to model.
        widths: new tokens per pass, each at least 1.
        context: tokens in the cache.
        repeats: timed passes of each.
        clock: seconds.

    Returns:
        {name: {width: median milliseconds}}.

    Raises:
        ConfigError: no or bad widths, or context and width exceed a model's context window.
    """
    if not widths or min(widths) < 1 or len(set(widths)) < len(widths):
        raise ConfigError(f"widths: got {list(widths)}, expected distinct numbers from 1.")
    caches: dict[str, Cache] = {}
    for name, backbone in backbones.items():
        if context + max(widths) > backbone.max_seq_len:
            raise ConfigError(
                f"widths: got {max(widths)} after {context} cached tokens, expected at most "
                f"{backbone.max_seq_len} together ({name})."
            )
        caches[name] = backbone.new_cache(1, context + max(widths))
        _forward(backbone, caches[name], context, Write.COMMIT)
    cases = [(name, width) for name in backbones for width in widths]
    times: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for turn in range(-_WARM_UP, repeats):
        for name, width in rotated(cases, turn):
            backbone = backbones[name]
            _synchronize(backbone.device)
            started = clock()
            _forward(backbone, caches[name], width, Write.SCRATCH)
            _synchronize(backbone.device)
            if turn >= 0:
                times[name, width].append(clock() - started)
    return {
        name: {str(width): 1000 * median(times[name, width]) for width in widths}
        for name in backbones
    }


def _forward(backbone: Backbone, cache: Cache, width: int, write: Write) -> None:
    """Run a causal pass of one row; which tokens it reads does not matter."""
    start = cache.lengths[0]
    positions = torch.arange(start, start + width, device=backbone.device)[None]
    ids = positions % backbone.vocab_size
    backbone.forward(ids, positions, causal([start], width), cache, [0], write=write)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
