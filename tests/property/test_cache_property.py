"""Any sequence of cache operations against plain Python lists."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.cache.kv_cache import KVCache

LAYERS, ROWS, GROUPS, CAPACITY, DIM = 2, 2, 2, 9, 2

operations = st.lists(
    st.tuples(
        st.sampled_from(["write", "write", "commit", "truncate", "gather", "free", "refresh"]),
        st.integers(0, ROWS - 1),
        st.integers(0, CAPACITY),
        st.integers(0, CAPACITY),
        st.sets(st.integers(0, CAPACITY - 1)),
    ),
    max_size=25,
)


class Lists:
    """The twin: per row the committed values, and what lies behind them."""

    def __init__(self) -> None:
        self.cells = [[0] * CAPACITY for _ in range(ROWS)]
        self.lengths = [0] * ROWS

    def write(self, row, values, start):
        self.cells[row][start : start + len(values)] = values

    def gather(self, row, keep):
        kept = [self.cells[row][self.lengths[row] + k] for k in keep]
        self.write(row, kept, self.lengths[row])
        self.lengths[row] += len(keep)


def value_of(serial, layer):
    """K/V of one token, [2, G, 1, D]; every number differs."""
    count = 2 * GROUPS * DIM
    return torch.arange(count).reshape(2, GROUPS, 1, DIM) / count + layer / 4 + serial


@settings(max_examples=150, deadline=None)
@given(operations)
def test_cache_equals_lists(steps):
    cache = KVCache(
        LAYERS, ROWS, GROUPS, CAPACITY, DIM, dtype=torch.float64, device=torch.device("cpu")
    )
    lists, serial = Lists(), 0
    for kind, row, a, b, offsets in steps:
        length = lists.lengths[row]
        room = CAPACITY - length
        if kind in {"write", "refresh"}:
            start = length if kind == "write" else min(a, length)
            count = min(b, (CAPACITY if kind == "write" else length) - start)
            values = list(range(serial + 1, serial + 1 + count))
            serial += count
            for layer in range(LAYERS if count else 0):
                block = torch.cat([value_of(v, layer) for v in values], dim=2).double()
                if kind == "write":
                    cache.write(layer, row, block)
                else:
                    cache.refresh(layer, row, torch.arange(start, start + count), block)
            lists.write(row, values, start)
        elif kind == "commit":
            cache.commit(row, min(a, room))
            lists.lengths[row] += min(a, room)
        elif kind == "truncate":
            cache.truncate(row, min(a, length))
            lists.lengths[row] = min(a, length)
        elif kind == "gather":
            keep = sorted(k for k in offsets if k < room)
            cache.gather(row, keep)
            # What lies behind a gathered row is scratch that nobody may rely on.
            lists.gather(row, keep)
        else:
            cache.free(row)
            lists.lengths[row] = 0
        assert cache.lengths == lists.lengths
        for each in range(ROWS):
            for layer in range(LAYERS):
                keys, values = cache.read(layer, each, lists.lengths[each])
                held = lists.cells[each][: lists.lengths[each]]
                for at, expected in enumerate(held):
                    if expected:
                        block = value_of(expected, layer).double()
                        assert torch.equal(keys[:, at], block[0, :, 0])
                        assert torch.equal(values[:, at], block[1, :, 0])
