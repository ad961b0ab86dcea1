"""A recorded pass gives what an ordinary one gives, whatever its numbers are.

On a GPU these are CUDA graphs; elsewhere a stand-in that is as strict (tests/kernel_passes.py).
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from unittest import mock

import pytest
import torch
from kernel_passes import (
    DEVICE,
    PASSES,
    VOCAB,
    StandIn,
    drafter,
    filled_cache,
    model,
    recording,
    run,
)

from hybrid import HybridDecoder
from hybrid.attention.pattern import bidirectional, causal
from hybrid.cache.pool import CachePool
from hybrid.kernels import dispatch
from hybrid.models.graphs import CudaRecorder, Graphs, bucket, reach_bucket
from hybrid.protocols import Entry, ForwardOutput
from hybrid.types import Write

pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []


@pytest.fixture(autouse=True)
def _on_kernels():
    with dispatch.force(None, "triton"):
        yield


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for what in ours:
        assert torch.equal(ours[what].nan_to_num(9.0), theirs[what].nan_to_num(9.0)), what


def steps(backbone, kind, calls, lengths=(9, 5, 7)):
    """Run passes of one kind one after the other; each row's first new token is then committed."""
    made = filled_cache(backbone, lengths)
    for seed, rows in enumerate(calls):
        yield run(backbone, made, kind, rows, seed)
        for row in rows:
            if kind != "refresh":
                made.commit(row, 1)


def check(kind, calls, name="mistral-window"):
    """Run the calls recorded and not; return the twin that records."""
    backbone, twin = model(name), recording(model(name))
    for ours, theirs in zip(steps(twin, kind, calls), steps(backbone, kind, calls), strict=True):
        assert_same(ours, theirs)
    return twin


@pytest.mark.parametrize("kind", [kind for kind in PASSES if "carrying-" not in kind])
def test_a_replay_equals_an_ordinary_pass(kind):
    """Tokens, rows and lengths change between the replays."""
    twin = check(kind, [(0,), (1,), (1,), (2,)])
    assert len(twin.graphs) == 1


@pytest.mark.parametrize("kind", ["verify", "ragged", "carrying", "wide-carrying", "random-tokens"])
def test_rows_that_fill_up_a_batch_touch_nothing(kind):
    """Three rows run as four; when one has ended, its place is filled up."""
    twin = recording(model("llama"))
    made = filled_cache(twin, (9, 5, 7, 6))
    found = [run(twin, made, kind, rows, seed) for seed, rows in enumerate([(0, 1, 2, 3)] * 2)]
    kept = made.data.clone()
    found.append(run(twin, made, kind, (3, 0, 2), 2))
    assert len(twin.graphs) == 1
    assert torch.equal(made.data[:, :, 1].nan_to_num(9.0), kept[:, :, 1].nan_to_num(9.0))
    alone = filled_cache(twin, (9, 5, 7, 6))
    assert_same(found[-1], run(model("llama"), alone, kind, (3, 0, 2), 2))


def verified(backbone, made, width, seed, **more):
    """A verify pass of all rows; what it returns, and the keys of its tokens and before."""
    starts, rows = made.lengths, range(len(made.lengths))
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 31, (len(rows), width), generator=draw).to(DEVICE)
    positions = (torch.tensor(starts)[:, None] + torch.arange(width)).to(DEVICE)
    out = backbone.forward(ids, positions, causal(starts, width), made, rows, **more)
    found = {"logits": out.logits, **{f"tap {n}": own for n, own in out.hidden.items()}}
    keys = {f"keys {n}": made.data[:, :, n, :, : starts[n] + width].clone() for n in rows}
    return {**found, **keys}


def test_widths_that_round_up_to_one_power_of_two_share_a_record():
    backbone, twin = model("mistral-window"), recording(model("mistral-window"))
    caches = [filled_cache(own, (9, 4)) for own in (twin, backbone)]
    for seed, width in enumerate((5, 6, 8, 7, 5)):
        ours, theirs = (
            verified(own, made, width, seed, taps=(1,))
            for own, made in zip((twin, backbone), caches, strict=True)
        )
        assert ours["logits"].shape == (2, width, VOCAB)
        assert ours["logits"].is_contiguous()
        assert_same(ours, theirs)
        for made in caches:
            made.commit(0, 2)
            made.commit(1, 1)
    assert len(twin.graphs) == 1


def test_nothing_is_added_where_the_cache_has_no_place_for_it():
    """Nor where logits are counted from the last token."""
    twin = recording(model("llama"))
    made = twin.new_cache(1, 16)
    assert made.data.shape[4] == 16
    made.data.normal_()
    made.commit(0, 12)
    for seed in range(2):
        verified(twin, made, 3, seed)  # as four, which just fit
        verified(twin, made, 4, seed)
    assert len(twin.graphs) == 1
    made.commit(0, 1)
    for seed in range(2):
        verified(twin, made, 3, seed)
    assert len(twin.graphs) == 2
    last = [verified(twin, made, 3, seed, num_logits=1) for seed in (5, 6)]
    whole = [verified(twin, made, 3, seed) for seed in (5, 6)]
    assert len(twin.graphs) == 3
    for ours, theirs in zip(last, whole, strict=True):
        torch.testing.assert_close(ours["logits"], theirs["logits"][:, -1:])


def test_the_longest_row_decides_whether_there_is_a_place():
    """In the last row of the cache: behind it there is no memory."""
    backbone, twin = model("llama"), recording(model("llama"))
    found = []
    for own in (backbone, twin):
        made = own.new_cache(2, 16)
        made.data.copy_(torch.randn(made.data.shape, generator=torch.Generator().manual_seed(0)))
        made.commit(0, 3)
        made.commit(1, 13)
        found.append([verified(own, made, 3, seed) for seed in range(3)])
    for ours, theirs in zip(*found, strict=True):
        assert_same(ours, theirs)


def test_a_causal_refresh_writes_its_own_tokens_alone():
    start, found = 9, []
    for own in (recording(model("llama")), model("llama")):
        made = filled_cache(own, (start,))
        ids, positions = torch.tensor([[3, 1, 4]]), torch.tensor([[2, 5, 7]])
        given = ids.to(DEVICE), positions.to(DEVICE), causal([start], 3), made, [0]
        for _ in range(3):
            out = own.forward(*given, write=Write.REFRESH)
        found.append((out.logits, made.data[..., :start, :]))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("field", ["prefix_len", "positions"])
def test_what_tokens_see_or_where_they_stand_is_not_changed_by_a_record(field):
    """Causal among each other, but not one behind the other: denoising passes are like that."""
    start, pattern = 9, causal([9], 3)
    special = {"prefix_len": ((9, 4, 2),), "positions": ((9, 11, 30),)}[field]
    pattern = replace(pattern, **{field: special})
    found = []
    for own in (recording(model("mistral-window")), model("mistral-window")):
        made = filled_cache(own, (start,))
        ids = torch.tensor([[3, 1, 4]], device=DEVICE)
        positions = torch.tensor(pattern.positions or [[9, 10, 11]], device=DEVICE)
        for _ in range(3):
            out = own.forward(ids, positions, pattern, made, [0])
        found.append(out.logits)
    assert torch.equal(*found)
    assert found[0].shape[1] == 3


def late(backbone, adapter, hidden, made):
    """The last row of logits of a draft pass from given states, with an adapter or without."""
    start, width = made.lengths[0], hidden.shape[1]
    positions = torch.arange(start, start + width, device=DEVICE)[None]
    pattern, entry = bidirectional([start], width), Entry(1, hidden, adapter)
    out = backbone.forward(None, positions, pattern, made, [0], entry=entry, num_logits=1)
    assert out.logits is not None
    return out.logits


def test_a_recorded_draft_runs_its_adapter_and_a_recorded_target_does_not():
    """Of equal shapes: each has a record of its own, and follows its own weights."""
    backbone, twin = model("llama"), recording(model("llama"))
    adapter = drafter(twin)._adapter
    made, other = filled_cache(twin, (9,)), filled_cache(backbone, (9,))
    draw = torch.Generator().manual_seed(0)
    for number in range(4):
        hidden = torch.randn(1, 2, backbone.hidden_size, generator=draw).to(DEVICE)
        if number == 3:
            for layer in adapter.layers[1:]:  # what is recorded is their weights, not a copy
                layer.qkv.b.weight.mul_(-3)
        found = [late(twin, own, hidden, made) for own in (adapter, None)]
        assert torch.equal(found[0], late(backbone, adapter, hidden, other))
        assert torch.equal(found[1], late(backbone, None, hidden, other))
        assert not torch.allclose(*found, atol=1e-2)
    assert len(twin.graphs) == 2
    for layer in adapter.layers[1:]:
        layer.qkv.b.weight.div_(-3)


def test_what_a_pass_returned_stays_as_it_was():
    twin = recording(model("llama"))
    made = filled_cache(twin)
    found = [run(twin, made, "ar", (0,), seed) for seed in range(2)]
    kept = [{what: tensor.clone() for what, tensor in own.items()} for own in found]
    run(twin, made, "ar", (0,), 9)
    for ours, before in zip(found, kept, strict=True):
        assert_same(ours, before)


def prompt(backbone):
    made, ids = backbone.new_cache(1, 8), torch.zeros(1, 2, dtype=torch.long, device=DEVICE)
    for start in (0, 2, 4):
        positions = torch.arange(start, start + 2, device=DEVICE)[None]
        backbone.forward(ids, positions, causal([start], 2), made, [0], write=Write.COMMIT)


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("llama", prompt),
        ("llama-dynamic", lambda twin: list(steps(twin, "ar", [(0,)] * 3))),
        ("llada2-partial-rotary-moe", lambda twin: list(steps(twin, "ar", [(0,)] * 3))),
    ],
    ids=["prefill", "dynamic-rope", "experts"],
)
def test_passes_that_are_not_recorded(name, calls):
    twin = recording(model(name))
    calls(twin)
    assert len(twin.graphs) == 0


# The shelf itself


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
