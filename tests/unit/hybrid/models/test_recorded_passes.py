"""A recorded pass gives what an ordinary one gives, whatever its numbers are.

On a GPU these are CUDA graphs; elsewhere a stand-in that is as strict (tests/kernel_passes.py).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_passes import (
    DEVICE,
    PASSES,
    VOCAB,
    drafter,
    filled_cache,
    model,
    recording,
    run,
)

from hybrid.attention.pattern import bidirectional, causal
from hybrid.kernels import dispatch
from hybrid.protocols import Entry
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
