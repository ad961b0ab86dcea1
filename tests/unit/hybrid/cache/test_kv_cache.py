"""KVCache: what each operation keeps, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from hybrid.cache.kv_cache import KVCache
from hybrid.errors import CapacityError
from hybrid.kernels.block_attention import KEY_TILE

LAYERS, GROUPS, DIM = 2, 2, 3


def make(batch=2, capacity=8):
    return KVCache(
        LAYERS, batch, GROUPS, capacity, DIM, dtype=torch.float32, device=torch.device("cpu")
    )


def pair(values, layer):
    """K/V [2, G, T, D] that tell layer, kind, head and value apart."""
    base = torch.tensor(values, dtype=torch.float32)[None, None, :, None]
    kind = torch.tensor([0.0, 0.5])[:, None, None, None]
    head = torch.arange(GROUPS)[None, :, None, None] / 8
    return base + kind + head + layer / 4 + torch.arange(DIM) / 64


def write(cache, row, values):
    for layer in range(LAYERS):
        cache.write(layer, row, pair(values, layer))


def check(cache, row, values):
    for layer in range(LAYERS):
        keys, got_values = cache.read(layer, row, len(values))
        expected = pair(values, layer)
        assert torch.equal(keys, expected[0])
        assert torch.equal(got_values, expected[1])


def test_scratch_is_visible_but_not_part_of_the_row():
    cache = make()
    write(cache, 0, [1, 2, 3])
    assert cache.lengths == [0, 0]
    check(cache, 0, [1, 2, 3])
    write(cache, 0, [4, 5])
    check(cache, 0, [4, 5])


def test_commit_keeps_a_prefix_of_the_scratch():
    cache = make()
    write(cache, 1, [1, 2, 3])
    cache.commit(1, 2)
    write(cache, 1, [9])
    cache.commit(1, 1)
    assert cache.lengths == [0, 3]
    check(cache, 1, [1, 2, 9])


def test_refresh_overwrites_in_place():
    cache = make()
    write(cache, 0, [1, 2, 3, 4])
    cache.commit(0, 4)
    for layer in range(LAYERS):
        cache.refresh(layer, 0, torch.tensor([3, 1]), pair([8, 9], layer))
    assert cache.lengths[0] == 4
    check(cache, 0, [1, 9, 3, 8])
    cache.require_committed(0, 4)
    with pytest.raises(CapacityError, match="cannot refresh row 0 up to position 5, it holds 4"):
        cache.require_committed(0, 5)


def test_gather_packs_the_kept_positions():
    cache = make()
    write(cache, 0, [1, 2])
    cache.commit(0, 2)
    write(cache, 0, [10, 11, 12, 13, 14])
    cache.gather(0, [0, 2, 3])
    assert cache.lengths[0] == 5
    check(cache, 0, [1, 2, 10, 12, 13])


@pytest.mark.parametrize("keep", [[1, 1], [2, 1], [-1], [0, -1]])
def test_gather_refuses_disorder(keep):
    cache = make()
    with pytest.raises(CapacityError, match="strictly ascending"):
        cache.gather(0, keep)
    assert cache.lengths == [0, 0]


def test_gather_of_nothing_commits_nothing():
    cache = make()
    cache.gather(0, [])
    assert cache.lengths == [0, 0]


def test_truncate_and_free():
    cache = make()
    for row in (0, 1):
        write(cache, row, [1, 2, 3])
        cache.commit(row, 3)
    cache.truncate(0, 1)
    cache.free(1)
    assert cache.lengths == [1, 0]
    check(cache, 0, [1])


@pytest.mark.parametrize("length", [-1, 4])
def test_truncate_refuses_what_is_not_there(length):
    cache = make()
    write(cache, 0, [1, 2, 3])
    cache.commit(0, 3)
    with pytest.raises(CapacityError, match=f"cannot truncate row 0 to {length}, it holds 3"):
        cache.truncate(0, length)


@pytest.mark.parametrize("call", ["require", "commit", "gather"])
def test_more_than_fits_is_refused(call):
    cache = make(capacity=4)
    write(cache, 0, [1, 2, 3])
    cache.commit(0, 3)
    argument = [0, 1] if call == "gather" else 2
    with pytest.raises(CapacityError, match="row 0 needs 5 positions, got a cache of 4"):
        getattr(cache, call)(0, argument)
    assert cache.lengths[0] == 3
    cache.require(0, 1)


def test_commit_cannot_take_back():
    cache = make()
    write(cache, 0, [1, 2])
    cache.commit(0, 2)
    with pytest.raises(CapacityError, match="cannot commit -1"):
        cache.commit(0, -1)


def test_read_gives_views():
    cache = make()
    keys, values = cache.read(0, 0, 4)
    assert keys.data_ptr() == cache.data.data_ptr()
    assert keys.shape == values.shape == (GROUPS, 4, DIM)


def test_memory_is_known_and_taken_once():
    cache = make(batch=3, capacity=5)
    assert cache.nbytes == LAYERS * 2 * 3 * GROUPS * KEY_TILE * DIM * 4, "whole tiles of keys"
    before = cache.data.data_ptr()
    write(cache, 0, [1, 2, 3])
    cache.gather(0, [1, 2])
    assert cache.data.data_ptr() == before


def test_too_large_for_the_machine():
    with pytest.raises(CapacityError, match=r"cannot allocate \d+ MiB for 2 rows of \d+ tokens"):
        make(capacity=2**58)
