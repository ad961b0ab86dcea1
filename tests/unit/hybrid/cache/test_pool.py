"""Tensors of caches go from call to call, and never to two at once."""

from __future__ import annotations

import pytest
import torch

from hybrid.cache import kv_cache
from hybrid.cache.pool import MAX_IDLE, POSITIONS, CachePool, pooled
from hybrid.errors import CapacityError

CPU = torch.device("cpu")


def take(pool, capacity=10, batch=1):
    return pool.new_cache(1, batch, 1, capacity, 2, dtype=torch.float32, device=CPU)


@pytest.fixture
def forgotten():
    return []


@pytest.fixture
def pool(forgotten):
    return CachePool(forgotten.append)


def test_a_cache_that_is_gone_leaves_its_tensor_to_the_next(pool):
    first = take(pool, 10)
    first.commit(0, 7)
    address, size = first.data.data_ptr(), first.data.shape[4]
    assert (first.capacity, size) == (10, POSITIONS)
    del first
    assert pool.idle_nbytes == POSITIONS * 2 * 2 * 4
    second = take(pool, 500)
    assert second.data.data_ptr() == address
    assert (second.lengths, second.capacity, pool.idle_nbytes) == ([0], 500, 0)
    with pytest.raises(CapacityError, match="needs 501 positions, got a cache of 500"):
        second.require(0, 501)


def test_caches_in_use_share_nothing(pool):
    caches = [take(pool) for _ in range(4)]
    assert len({own.data.data_ptr() for own in caches}) == 4
    caches.pop()
    caches.append(take(pool))
    assert len({own.data.data_ptr() for own in caches}) == 4


def test_another_size_is_another_tensor(pool):
    own = take(pool)
    address = own.data.data_ptr()
    del own
    others = [take(pool, batch=2), take(pool, POSITIONS + 1)]
    assert address not in {other.data.data_ptr() for other in others}
    assert take(pool).data.data_ptr() == address


def test_few_are_kept_and_the_others_are_forgotten(pool, forgotten):
    caches = [take(pool) for _ in range(MAX_IDLE + 2)]
    datas = [own.data for own in caches]
    while caches:
        caches.pop(0)
    assert [any(data is own for own in forgotten) for data in datas] == [True, True, False, False]


def test_an_error_gives_back_too(pool):
    def fail():
        own = take(pool)
        raise ValueError(own.data.data_ptr())

    try:
        fail()
    except ValueError as error:
        address = error.args[0]
    assert take(pool).data.data_ptr() == address


def test_idle_ones_make_room(pool, forgotten, monkeypatch):
    own = take(pool)
    del own
    zeros, calls = torch.zeros, []

    def scarce(*args, **kwargs):
        calls.append(len(forgotten))
        if not forgotten:
            raise RuntimeError("out of memory")
        return zeros(*args, **kwargs)

    monkeypatch.setattr(kv_cache.torch, "zeros", scarce)
    other = take(pool, batch=2)
    assert other.data.shape[2] == 2
    assert calls == [0, 1]
    forgotten.clear()
    with pytest.raises(CapacityError, match="cannot allocate"):
        take(pool, batch=3)


@pytest.mark.parametrize(("capacity", "size"), [(1, 1024), (1024, 1024), (1025, 2048)])
def test_sizes_are_whole(capacity, size):
    assert pooled(capacity) == size
