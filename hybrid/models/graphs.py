"""Passes recorded once and replayed: on a GPU a step is then a handful of launches, not a thousand.

A record (a CUDA graph) is a fixed list of kernels on fixed addresses. So there is one per cache,
plan and launch: which layers run (a draft's are an adapter's), who sees whom, how many rows and
tokens, how far the longest row may reach; the last three are powers of two. What differs from step
to step is copied into the tensors that it was recorded with. What passes return lies in the same
place for all of them, and is copied from there. Next: hybrid/cache/pool.py.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hybrid.errors import KernelUnavailableError
from hybrid.models.passes import Same
from hybrid.protocols import ForwardOutput

LIMIT = 128  # records that are kept
KEY_RANGE = 512  # the least reach of a record: one range of keys of a narrow pass

Pass = Callable[[Mapping[str, Tensor]], ForwardOutput]
CARRIED = "carried"  # name of an output


class Recorder(Protocol):
    """Records a pass."""

    def __call__(self, function: Callable[[], ForwardOutput]) -> Callable[[], ForwardOutput]:
        """Return what runs `function` again, on the same tensors, and returns what it fills."""
        ...


class CudaRecorder:
    """CUDA graphs that share one pool of memory: only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        """Record on `device`."""
        self._device = device
        # Of its own: torch's is on the device that was current when the first graph was made.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._last: torch.cuda.CUDAGraph | None = None

    def __call__(self, function: Callable[[], ForwardOutput]) -> Callable[[], ForwardOutput]:
        """Return what replays the graph.

        Raises:
            KernelUnavailableError: the pass does what a graph cannot.
        """
        with torch.cuda.device(self._device):
            # Whatever is compiled, tuned or allocated at first use must not be in the record.
            function()
            graph = torch.cuda.CUDAGraph()
            try:
                # What other threads ask of the device meanwhile is no error of this one's.
                with torch.cuda.graph(
                    graph, self._pool, self._stream, capture_error_mode="thread_local"
                ):
                    out = function()
            except RuntimeError as error:
                raise KernelUnavailableError(
                    f"CUDA graph: a pass cannot be recorded: {error} "
                    "Set HYBRID_CUDA_GRAPHS=0 to run it kernel by kernel."
                ) from error
        # A pool whose graphs are all gone takes no other graph, so the last one stays.
        self._last = graph

        def replay() -> ForwardOutput:
            graph.replay()
            return out

        return replay


@dataclass(frozen=True, slots=True)
class _Record:
    """A recorded pass, and the tensors that it reads."""

    inputs: dict[str, Tensor]
    replay: Callable[[], ForwardOutput]


class Graphs:
    """The records of one model, the least recently used dropped first."""

    def __init__(self, recorder: Recorder, limit: int = LIMIT) -> None:
        """Begin empty.

        Args:
            recorder: records a pass.
            limit: most records that are kept.
        """
        self._recorder, self._limit = recorder, limit
        # None: seen once. A shape that does not come again is not worth a record.
        self._records: OrderedDict[tuple[Same, Hashable], _Record | None] = OrderedDict()
        self._places: dict[Hashable, Tensor] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return how many records there are."""
        return sum(record is not None for record in self._records.values())

    def run(
        self,
        data: Tensor,
        key: Hashable,
        function: Pass,
        tensors: Mapping[str, Tensor],
        crop: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor,
    ) -> ForwardOutput:
        """Return `function(tensors)`, from the second time on recorded, then replayed.

        Args:
            data: of the cache.
            key: passes of equal keys and shapes differ in what their tensors hold alone.
            function: reads `data`, weights and its tensors, and nothing back from the device.
            tensors: of this pass.
            crop: gives what is wanted of each output, by its name.

        Returns:
            Tensors that no later pass changes.
        """
        own = torch.contiguous_format
        with self._lock:  # the next pass of whoever writes to the same places
            out = self._run(data, key, function, tensors)
            return _each(lambda *item: crop(*item).clone(memory_format=own), out)

    def _run(
        self, data: Tensor, key: Hashable, function: Pass, tensors: Mapping[str, Tensor]
    ) -> ForwardOutput:
        place = Same(data), (key, *((name, own.shape) for name, own in tensors.items()))
        if place not in self._records:
            self._keep(place, None)
            return function(tensors)
        record = self._records[place]
        if record is None:
            inputs = {name: tensor.clone() for name, tensor in tensors.items()}
            record = _Record(inputs, self._recorder(lambda: self._placed(function(inputs))))
        else:
            for name, tensor in tensors.items():
                record.inputs[name].copy_(tensor)
        self._keep(place, record)
        return record.replay()

    def forget(self, data: Tensor) -> None:
        """Drop the records of a cache that is given up."""
        # Without the lock: a cache may be given up at any moment, even while this thread holds it.
        for place in [p for p in list(self._records) if p[0].part is data]:
            self._records.pop(place, None)

    def _placed(self, out: ForwardOutput) -> ForwardOutput:
        """Return an output in the place that all records have for it, so that none keeps its own.

        A place that is too small is left to the records that know it.
        """

        def move(name: str, tensor: Tensor) -> Tensor:
            key, size = (name, tensor.dtype), tensor.numel()
            if key not in self._places or len(self._places[key]) < size:
                self._places[key] = torch.empty_like(tensor).flatten()
            return self._places[key][:size].view(tensor.shape).copy_(tensor)

        return _each(move, out)

    def _keep(self, place: tuple[Same, Hashable], record: _Record | None) -> None:
        self._records[place] = record
        self._records.move_to_end(place)
        while len(self._records) > self._limit:
            self._records.popitem(last=False)


def _each(function: Callable[[str, Tensor], Tensor], out: ForwardOutput) -> ForwardOutput:
    """Return an output with `function` of every tensor and its name."""
    return ForwardOutput(
        None if out.logits is None else function("logits", out.logits),
        {layer: function(f"hidden {layer}", states) for layer, states in out.hidden.items()},
        None if out.carried is None else function(CARRIED, out.carried),
    )


def bucket(count: int) -> int:
    """Return the rows, or tokens of a row, that a record has for so many: a power of two."""
    return 1 << (count - 1).bit_length()


def reach_bucket(max_end: int, room: int) -> int:
    """Return the positions that a record reaches to, for rows of up to `max_end`.

    It decides how many programs are started, not what they compute: those without keys add nothing.

    Args:
        max_end: the most keys of a row.
        room: positions of the cache.
    """
    return min(max(KEY_RANGE, bucket(max_end)), room)
