"""cache_gather against a Python list per row, and against `KVCache.gather`."""

from __future__ import annotations

import pytest
import torch

from hybrid.cache.kv_cache import KVCache
from hybrid.errors import ConfigError
from hybrid.kernels import dispatch
from hybrid.kernels.cache_gather import cache_gather

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def numbered(num_layers, batch, groups, slots, dim, dtype, device):
    """Every element has bits of its own as far as the dtype has so many."""
    shape = (num_layers, 2, batch, groups, slots, dim)
    bits = torch.arange(torch.Size(shape).numel()).reshape(shape)
    wide = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
    return bits.to(wide).view(dtype).to(device)


def moved(data, rows, starts, keep):
    """What the slots of each row hold afterwards, from lists."""
    out = data.clone()
    for row, start, offsets in zip(rows, starts, keep, strict=True):
        for place, offset in enumerate(o for o in offsets if o >= 0):
            out[:, :, row, :, start + place] = data[:, :, row, :, start + offset]
    return out


def bits(data):
    return data.cpu().view(torch.uint8)


def run(data, rows, starts, keep, implementation):
    tensors = (torch.tensor(t, device=data.device) for t in (rows, starts, keep))
    with dispatch.force("cache_gather", implementation):
        cache_gather(data, *tensors)
    assert dispatch.last("cache_gather") == implementation


KEEPS = {
    "nothing": ([1], [5], [[-1, -1]]),
    "all in place": ([0], [2], [[0, 1, 2]]),
    "the last": ([2], [0], [[31]]),
    "a path": ([1], [3], [[0, 2, 3, 9]]),
    "rows of their own": ([2, 0], [7, 1], [[1, 4, -1, -1], [0, 1, 2, 5]]),
    # What the first tile of positions writes, later ones must not have wanted.
    "more than a tile": ([1], [1], [[*range(1, 40)]]),
    "every other": ([0], [0], [[*range(1, 48, 2)]]),
}


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", KEEPS)
def test_equals_lists(name, dtype, implementation, device):
    rows, starts, keep = KEEPS[name]
    data = numbered(2, 3, 2, 48, 5, dtype, device)
    expected = moved(data, rows, starts, keep)
    run(data, rows, starts, keep, implementation)
    assert torch.equal(bits(data), bits(expected))


@pytest.mark.parametrize("count", [1, 63, 65, 127])
@pytest.mark.parametrize("dim", [1, 63, 64, 65, 80, 127])
def test_head_dimensions_and_counts_of_positions(dim, count, device):
    data, keep = numbered(1, 2, 3, 132, dim, torch.float32, device), [[*range(3, 3 + count)]]
    expected = moved(data, [1], [2], keep)
    run(data, [1], [2], keep, "triton")
    assert torch.equal(bits(data), bits(expected))


def test_equals_the_caches_own(device):
    cache = KVCache(2, 3, 2, 30, 8, dtype=torch.float32, device=device)
    cache.data.copy_(numbered(2, 3, 2, 32, 8, torch.float32, device))
    cache.commit(1, 6)
    data = cache.data.clone()
    cache.gather(1, [0, 3, 4, 7])
    run(data, [1], [6], [[0, 3, 4, 7]], "triton")
    kept = cache.lengths[1]
    assert kept == 10
    assert torch.equal(data[:, :, 1, :, :kept], cache.data[:, :, 1, :, :kept])
    assert torch.equal(data[:, :, [0, 2]], cache.data[:, :, [0, 2]])


def test_nothing_to_do(device):
    data = numbered(1, 2, 1, 16, 4, torch.float32, device)
    before = data.clone()
    none = torch.zeros(0, dtype=torch.int64, device=device)
    with dispatch.force("cache_gather", "triton"):
        cache_gather(data, none, none, none[:, None].expand(0, 3))
    assert torch.equal(bits(data), bits(before))


def test_refuses(device):
    data = numbered(1, 2, 2, 16, 4, torch.float32, device)
    for cache, rows, keep, message in [
        (data[:, :, :1], [0], [[0]], "expected a whole"),
        (data[0], [0], [[0]], "expected a whole"),
        (data, [0], [[0], [1]], "keep is \\[2, 1\\].*expected \\[1, 1\\]"),
    ]:
        with pytest.raises(ConfigError, match=message):
            run(cache, rows, [0], keep, "triton")
