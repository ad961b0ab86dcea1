"""`Graphs`, the shelf of records: what is kept, where results lie, and CUDA's recorder."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from contextlib import contextmanager, nullcontext, suppress
from unittest import mock

import pytest
import torch
from kernel_passes import (
    DEVICE,
    StandIn,
    filled_cache,
    model,
    recording,
)

from hybrid import HybridDecoder
from hybrid.cache.pool import CachePool
from hybrid.kernels import dispatch
from hybrid.models.graphs import CudaRecorder, Graphs, bucket, reach_bucket
from hybrid.protocols import ForwardOutput

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []


@pytest.fixture(autouse=True)
def _on_kernels():
    with dispatch.force(None, "triton"):
        yield


def output(tensors):
    return ForwardOutput(tensors["x"] * 2)


def test_the_least_recently_used_are_dropped():
    recorder, data = StandIn(), torch.zeros(1)
    graphs = Graphs(recorder, limit=2)

    def call(key, value):
        got = graphs.run(data, key, output, {"x": torch.tensor([value])}).logits
        assert got.tolist() == [2 * value]

    call("once", 1.0)
    assert recorder.num_recorded == 0
    for value in (1.0, 2.0, 3.0):
        for key in "ab":
            call(key, value)
    assert (recorder.num_recorded, recorder.num_replayed, len(graphs)) == (2, 2, 2)
    call("a", 4.0)
    call("c", 4.0)  # in place of b
    call("a", 5.0)
    assert (recorder.num_recorded, len(graphs)) == (2, 1)
    call("b", 5.0)
    call("b", 6.0)
    assert recorder.num_recorded == 3


def test_another_shape_is_another_record():
    graphs, data = Graphs(StandIn()), torch.zeros(1)
    for width in (1, 2) * 3:
        x = torch.rand(width)
        assert torch.equal(graphs.run(data, "key", output, {"x": x}).logits, 2 * x)
    assert len(graphs) == 2


def test_records_belong_to_a_cache_and_go_with_it():
    recorder = StandIn()
    graphs, caches = Graphs(recorder), [torch.zeros(1), torch.zeros(1)]
    for data in caches * 2:
        graphs.run(data, "key", output, {"x": torch.ones(1)})
    assert len(graphs) == 2
    graphs.forget(caches[0])
    assert len(graphs) == 1
    graphs.run(caches[1], "key", output, {"x": torch.ones(1)})
    assert (recorder.num_recorded, recorder.num_replayed) == (2, 1)


def test_records_have_one_place_for_what_they_return():
    """So that their number is not what decides how much memory they keep."""
    graphs, data = Graphs(StandIn()), torch.zeros(1)

    def function(tensors):
        return ForwardOutput(tensors["x"] * 2, {3: tensors["x"].double()}, tensors["x"] + 1)

    kept = []
    for size in (2, 5, 3) * 2:
        x = torch.rand(1, size)
        kept.append((x, graphs.run(data, "key", function, {"x": x})))
    assert len(graphs) == 3
    for x, out in kept:
        assert torch.equal(out.logits, x * 2)
        assert torch.equal(out.hidden[3], x.double())
        assert torch.equal(out.carried, x + 1)
    assert [len(place) for place in graphs._places.values()] == [5, 5, 5]


def test_calls_at_once_wait_for_each_other():
    """A pass writes where the one before it wrote, so that one must have been copied."""
    active, most = [], []

    class Slow(StandIn):
        def __call__(self, function):
            replay = super().__call__(function)

            def slowly():
                active.append(1)
                out = replay()
                time.sleep(0.002)
                most.append(len(active))
                return out

            return slowly

    graphs = Graphs(Slow())
    seen = {}

    def copied(name, tensor):
        active.pop()
        return tensor

    def call(value):
        data, x = torch.zeros(1), torch.full((4,), float(value))
        first = [graphs.run(data, "key", output, {"x": x})]
        rest = [graphs.run(data, "key", output, {"x": x}, copied) for _ in range(8)]
        seen[value] = [out.logits.tolist() for out in first + rest]

    threads = [threading.Thread(target=call, args=(value,)) for value in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {value: [[2.0 * value] * 4] * 9 for value in range(3)}
    assert max(most) == 1


@pytest.mark.parametrize("recorder", [StandIn, pytest.param(CudaRecorder, marks=pytest.mark.gpu)])
def test_a_record_outlives_the_place_that_it_knows(recorder):
    """A larger output gets a place of its own; what was recorded before goes on writing to its."""
    device = torch.device("cpu") if recorder is StandIn else DEVICE
    graphs = Graphs(recorder() if recorder is StandIn else recorder(device))
    data = torch.zeros(1, device=device)
    for round_ in range(3):
        for size in (2, 9, 4, 30):
            x = torch.full((1, size), float(round_), device=device)
            assert torch.equal(graphs.run(data, "key", output, {"x": x}).logits, 2 * x)
    assert len(graphs) == 4


# CUDA's recorder


class Pools:
    """Stands in for torch.cuda, whose pools of memory take no graph when theirs are all gone."""

    def __init__(self, monkeypatch):
        self.graphs, self.streams, self.num_pools = [], [], 0
        monkeypatch.setattr(torch.cuda, "device", nullcontext)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"stream on {device}")
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", self.handle)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: mock.Mock())
        monkeypatch.setattr(torch.cuda, "graph", self.record)

    def handle(self):
        self.num_pools += 1
        return self.num_pools

    @contextmanager
    def record(self, graph, pool, stream, capture_error_mode):
        alive = [own for own in self.graphs if own() is not None]
        assert alive or not self.graphs, "the pool has been given up"
        self.graphs, self.streams = [*alive, weakref.ref(graph)], [*self.streams, stream]
        yield


def test_when_all_records_are_dropped_others_can_be_made(monkeypatch):
    pools, calls = Pools(monkeypatch), []
    graphs = Graphs(CudaRecorder(torch.device("cuda", 1)))

    def function(tensors):
        calls.append(len(pools.graphs))
        return output(tensors)

    for _ in range(3):
        data = torch.zeros(1)
        for _ in range(3):
            graphs.run(data, "key", function, {"x": torch.ones(1)})
        graphs.forget(data)
        assert len(graphs) == 0
        gc.collect()
    assert pools.num_pools == 1
    assert set(pools.streams) == {"stream on cuda:1"}
    # As it is, once more before it is recorded, recorded; a replay does not call it.
    assert len(calls) == 3 * 3


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
def test_when_all_cuda_graphs_are_dropped_others_can_be_made():
    """A product leaves its workspace in the pool, which is then not simply made anew."""
    graphs, x = Graphs(CudaRecorder(DEVICE)), torch.rand(64, 64, device=DEVICE)
    for _ in range(3):
        data = torch.zeros(1, device=DEVICE)
        for _ in range(3):
            got = graphs.run(data, "key", lambda t: ForwardOutput(t["x"] @ t["x"]), {"x": x})
            torch.testing.assert_close(got.logits, x @ x)
        graphs.forget(data)


MADE = filled_cache(model("llama"))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: torch.equal(x, x),
        lambda x: MADE.lengths,
    ],
    ids=["item", "tolist", "bool", "nonzero", "equal", "lengths"],
)
def test_the_stand_in_is_strict(read):
    def function():
        read(torch.ones(2))
        return ForwardOutput(None)

    with pytest.raises(AssertionError, match="reads from the device|asks the host"):
        StandIn()(function)


@pytest.mark.parametrize(("count", "power"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (9, 16)])
def test_batches_and_widths_are_powers_of_two(count, power):
    assert bucket(count) == power


def test_a_reach_is_a_power_of_two_and_fits_the_cache():
    found = [reach_bucket(end, 3072) for end in (1, 512, 513, 1024, 2049, 3072)]
    assert found == [512, 512, 1024, 1024, 3072, 3072]
    assert reach_bucket(9, 48) == 48


# From call to call


def test_calls_share_caches_and_so_records():
    """Whether a call ends, fails or is closed; calls at once have caches of their own."""
    twin = recording(model("llama"))
    twin.pool = CachePool(twin.graphs.forget)
    decoder, request = HybridDecoder(twin), {"strategy": "ar", "max_new_tokens": 4}
    expected = decoder.generate([3, 1], **request).token_ids
    assert len(twin.graphs) == 1
    stream = decoder.stream([3, 1], **request)
    next(stream)

    def fail(*args, **given):
        raise ZeroDivisionError

    with mock.patch.object(twin, "forward", fail), suppress(ZeroDivisionError):
        decoder.generate([3, 1], **request)  # pytest.raises would keep the error, so the cache
        pytest.fail("nothing was raised")
    stream.close()
    del stream
    assert len(twin.pool._idle) == 2
    assert decoder.generate([3, 1], **request).token_ids == expected
    assert len(twin.graphs) == 1
    streams = [decoder.stream([3, 1], **request) for _ in range(2)]
    last = [None, None]
    for events in zip(*streams, strict=True):
        last = list(events)
    assert [event.result.token_ids for event in last] == [expected] * 2
    assert len(twin.graphs) == 2
