"""`KVCache`: one preallocated tensor that both modes read. Knows rows and positions, no tokens.

Diffusion drafts and verify passes write beyond a row's length (scratch); only `commit` and
`gather` make that part of the row, so a draft can never leak into the context.
Next: hybrid/decode/step.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid.cache.rows import Rows
from hybrid.errors import CapacityError
from hybrid.kernels.block_attention import KEY_TILE
from hybrid.kernels.cache_gather import cache_gather


class KVCache(Rows):
    """Keys and values of B rows, [L, 2, B, G, S, D], allocated once.

    Attributes:
        data: the tensor. Whoever reads beyond a row's scratch masks it, and blanks it first.
        lengths: committed positions per row.
        capacity: the most positions of a row; S is the next multiple of `KEY_TILE`, or more.
    """

    def __init__(
        self,
        num_layers: int,
        batch: int,
        num_kv_heads: int,
        capacity: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        data: Tensor | None = None,
    ) -> None:
        """Allocate everything; `nbytes` tells how much.

        Args:
            num_layers: L.
            batch: B.
            num_kv_heads: G.
            capacity: positions that a row may have.
            head_dim: D.
            dtype: of keys and values.
            device: where they lie.
            data: take this tensor, of at least as many positions; it may hold anything.

        Raises:
            CapacityError: the device has not enough memory.
        """
        super().__init__(batch, capacity)
        if data is not None:
            self.data = data
            return
        shape = (num_layers, 2, batch, num_kv_heads, padded(capacity), head_dim)
        try:
            self.data = torch.zeros(shape, dtype=dtype, device=device)
        except (RuntimeError, MemoryError) as error:
            raise CapacityError(
                f"KV cache: cannot allocate {_num_bytes(shape, dtype) / 2**20:.0f} MiB for "
                f"{batch} rows of {capacity} tokens on {device}. Use fewer rows or fewer tokens."
            ) from error

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.data.numel() * self.data.element_size()

    def write(self, layer: int, row: int, key_value: Tensor, offset: int = 0) -> None:
        """Write K/V of T new tokens to the row's scratch positions.

        Args:
            layer: layer index.
            row: cache row.
            key_value: [2, G, T, D].
            offset: how many scratch positions to leave free before them.
        """
        first = self.lengths[row] + offset
        self.data[layer, :, row, :, first : first + key_value.shape[2]] = key_value

    def refresh(self, layer: int, row: int, positions: Tensor, key_value: Tensor) -> None:
        """Overwrite committed K/V in place; the row's length stays.

        Args:
            layer: layer index.
            row: cache row.
            positions: [T] distinct; `require_committed` says whether they may be overwritten.
            key_value: [2, G, T, D].
        """
        self.data[layer, :, row].index_copy_(2, positions, key_value)

    def read(self, layer: int, row: int, length: int) -> tuple[Tensor, Tensor]:
        """Return views of the first `length` positions, scratch included: K, V [G, length, D].

        `length` may reach up to `padded(capacity)`.
        """
        pair = self.data[layer, :, row, :, :length]
        return pair[0], pair[1]

    def blank(self, row: int, start: int, end: int) -> None:
        """Zero scratch in all layers: a NaN that a draft left there would pass any mask."""
        if max(start, self.lengths[row]) < end:
            self.data[:, :, row, :, max(start, self.lengths[row]) : end] = 0

    def commit(self, row: int, num_tokens: int) -> None:
        """Make the first `num_tokens` scratch positions part of the row."""
        if num_tokens < 0:
            raise CapacityError(f"KV cache: cannot commit {num_tokens} tokens; use truncate.")
        self.require(row, num_tokens)
        self.lengths[row] += num_tokens

    def truncate(self, row: int, length: int) -> None:
        """Forget everything at and beyond `length`."""
        self.require_length(row, length)
        self.lengths[row] = length

    def gather(self, row: int, keep: Sequence[int]) -> None:
        """Commit the scratch positions `keep`, packed together, in the order given.

        Args:
            row: cache row.
            keep: offsets from the row's length, strictly ascending (a tree's accepted path, the
                accepted branch of a one-pass step).
        """
        keep = list(keep)
        if any(b <= a for a, b in zip(keep, keep[1:], strict=False)) or (keep and keep[0] < 0):
            raise CapacityError(f"KV cache: got offsets {keep}, expected them strictly ascending.")
        start = self.lengths[row]
        if keep:
            self.require(row, keep[-1] + 1)
        if keep != list(range(len(keep))):
            numbers = torch.tensor([row, start, *keep], device=self.data.device)
            cache_gather(self.data, numbers[:1], numbers[1:2], numbers[None, 2:])
        self.lengths[row] += len(keep)

    def free(self, row: int) -> None:
        """Empty the row."""
        self.lengths[row] = 0


def padded(length: int) -> int:
    """Return `length` rounded up to whole tiles of keys."""
    return -(-length // KEY_TILE) * KEY_TILE


def _num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    total = dtype.itemsize
    for size in shape:
        total *= size
    return total
