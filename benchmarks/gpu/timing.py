"""How long something takes on the device: medians, with what the L2 cache held thrown out.

Next: benchmarks/gpu/kernel_times.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[], Any]

REPEATS = 50
WARM_UP = 3
FLUSH_BYTES = 256 * 2**20  # several times the L2 cache of any card


class Timer:
    """Times calls one by one on a GPU; on a CPU it makes each once, to see that it runs."""

    def __init__(self, device: torch.device) -> None:
        """Take the memory that is written between two calls."""
        self.device, self.is_gpu = device, device.type == "cuda"
        size = FLUSH_BYTES if self.is_gpu else 0
        self._flush = torch.empty(size, dtype=torch.int8, device=device)

    def __call__(self, call: Call, *, captures: bool = True) -> dict[str, Any]:
        """Return microseconds of `call`: median, p20, p80, and whether a graph was replayed.

        A captured graph is what the decode loop replays, and leaves the launches of Python out. The
        first calls compile and tune.

        Args:
            call: launches work, the same each time.
            captures: False for what reads from the device, and cannot be captured.
        """
        if not self.is_gpu:
            started = time.perf_counter()
            call()
            return quantiles([1e6 * (time.perf_counter() - started)]) | {"is_graph": False}
        for _ in range(WARM_UP):
            call()
        torch.cuda.synchronize()
        replay = _captured(call) if captures else None
        times = self._events(replay or call)
        return quantiles(times) | {"is_graph": replay is not None}

    def _events(self, call: Call) -> list[float]:
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
        for start, end in pairs:
            self._flush.zero_()  # also keeps the GPU busy until the call has been launched
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [1e3 * start.elapsed_time(end) for start, end in pairs]


def _captured(call: Call) -> Call | None:
    """Return the replay of `call`, None where it cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        return None
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def wall_ms(call: Call, device: torch.device, *, calls: int = 10, repeats: int = 7) -> list[float]:
    """Return milliseconds per call of `repeats` runs of `calls` calls, with their launches.

    The clock stops when the device has finished. For work that does not fit the L2 cache.
    """
    if device.type == "cpu":
        calls, repeats = 1, 1
    else:
        for _ in range(WARM_UP):
            call()
    times = []
    for _ in range(repeats):
        synchronize(device)
        started = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - started) / calls)
    return times


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def quantiles(times: Sequence[float]) -> dict[str, float]:
    """Return median, p20 and p80 of at least one number."""
    ordered = sorted(times)

    def at(part: float) -> float:
        return ordered[round(part * (len(ordered) - 1))]

    return {"median": at(0.5), "p20": at(0.2), "p80": at(0.8)}
