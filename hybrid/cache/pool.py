"""`CachePool`: tensors of caches that nobody uses any more, kept for the next call.

A recorded pass (hybrid/models/graphs.py) knows the addresses of the cache that it was recorded
with. So on a GPU a call gets the tensor of an earlier call where one of its size is free.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from hybrid.cache.kv_cache import KVCache
from hybrid.errors import CapacityError

POSITIONS = 1024  # sizes are multiples of it, so that calls of different lengths meet
MAX_IDLE = 2


class CachePool:
    """Lends tensors to `KVCache`s, and takes each back when its cache is gone."""

    def __init__(self, forget: Callable[[Tensor], None]) -> None:
        """Begin empty.

        Args:
            forget: told of a tensor that is given up.
        """
        self._forget = forget
        self._idle: list[Tensor] = []  # the longest idle first

    @property
    def idle_nbytes(self) -> int:
        """Bytes that are kept and can be had."""
        return sum(data.numel() * data.element_size() for data in self._idle)

    def new_cache(
        self,
        num_layers: int,
        batch: int,
        num_kv_heads: int,
        capacity: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KVCache:
        """Return an empty cache; the arguments are those of `KVCache`.

        Its tensor is new, or holds what an earlier call has left there.

        Raises:
            CapacityError: the device has not enough memory, without the idle ones either.
        """
        size = num_layers, batch, num_kv_heads
        shape = (num_layers, 2, batch, num_kv_heads, pooled(capacity), head_dim)
        data = self._take(shape)
        if data is None:
            try:
                data = KVCache(*size, shape[4], head_dim, dtype=dtype, device=device).data
            except CapacityError:
                if not self._idle:
                    raise
                self._drop_all_but(0)
                return self.new_cache(*size, capacity, head_dim, dtype=dtype, device=device)
        cache = KVCache(*size, capacity, head_dim, dtype=dtype, device=device, data=data)
        weakref.finalize(cache, self._give, data).atexit = False
        return cache

    def _take(self, shape: tuple[int, ...]) -> Tensor | None:
        # The last that was used: calls one after the other share one, and its records.
        for index in reversed(range(len(self._idle))):
            if self._idle[index].shape == shape:
                return self._idle.pop(index)
        return None

    def _give(self, data: Tensor) -> None:
        self._idle.append(data)
        self._drop_all_but(MAX_IDLE)

    def _drop_all_but(self, count: int) -> None:
        while len(self._idle) > count:
            self._forget(self._idle.pop(0))


def pooled(capacity: int) -> int:
    """Return the positions that a tensor has for rows of `capacity`."""
    return -(-capacity // POSITIONS) * POSITIONS
