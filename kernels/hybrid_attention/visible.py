"""`Visible`: who sees which keys in one pass, as tensors that a kernel reads.

It is what `hybrid.attention.pattern.AttentionPattern` says, and where the keys lie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from hybrid.errors import ConfigError

WORD = 32  # bits
Kind = Literal["causal", "full", "bits"]


@dataclass(frozen=True, slots=True, eq=False)
class Visible:
    """T new tokens of B rows; made once per pass, for all layers.

    Every row's keys lie in a cache at positions 0, 1, ...: what was there before, and, from `start`
    on, those of the new tokens. Token t sees positions below `prefix[t]`, and of the new ones
    those that `kind` says.

    Attributes:
        prefix: [B, T] int32, at most `start`.
        start: [B] int32.
        positions: [B, T] int32 of the new tokens; cached position i has position i. For windows.
        table: [B, 1] int32 cache row of each row; or [B, P] its pages, in order.
        bits: [1 or B, T, W] int32, bit j % 32 of word j // 32 where the token sees new token j;
            empty unless `kind` is "bits".
        kind: which new tokens a new token sees: itself and earlier ones, all, or `bits`.
        num_local: new tokens that have keys from `start` on: T, or 0 where they lie in the prefix.
        max_end: the most keys of a row, or more; it sizes the launch.
        is_paged: `table` lists pages.
    """

    prefix: Tensor
    start: Tensor
    positions: Tensor
    table: Tensor
    bits: Tensor
    kind: Kind
    num_local: int
    max_end: int
    is_paged: bool

    @property
    def batch(self) -> int:
        """B."""
        return self.prefix.shape[0]

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.prefix.shape[1]

    @classmethod
    def build(cls, *described: Any, device: torch.device, **more: Any) -> Visible:
        """Make one, in one copy to `device`; the other arguments are those of `lay_out`."""
        layout, numbers = lay_out(*described, **more)
        return layout.place(torch.tensor(numbers, dtype=torch.int32).to(device))

    def dense(self, row: int, window: int | None = None) -> Tensor:
        """Return one row's mask over its cache positions, [T, start + num_local] boolean."""
        device, start = self.prefix.device, int(self.start[row])
        index = torch.arange(start + self.num_local, device=device)
        mask = index < self.prefix[row, :, None]
        mask[:, start:] = self._local(row)
        if window is not None:
            keys = index.clone()
            keys[start:] = self.positions[row, : self.num_local]
            mask &= keys > self.positions[row, :, None] - window
        return mask

    def _local(self, row: int) -> Tensor:
        shape, device = (self.num_tokens, self.num_local), self.prefix.device
        if self.kind == "bits":
            bits = self.bits[row if len(self.bits) > 1 else 0]
            token = torch.arange(self.num_local, device=device)
            return (bits[:, token // WORD] >> (token % WORD).int() & 1).bool()
        mask = torch.ones(shape, dtype=torch.bool, device=device)
        return mask.tril() if self.kind == "causal" else mask


@dataclass(frozen=True, slots=True)
class Layout:
    """What is fixed of a `Visible`, whatever its numbers are. Hashable: passes are known by it.

    Attributes:
        batch: B.
        num_tokens: T.
        table_width: 1, or pages per row.
        num_masks: masks of `bits`: 0, 1 or B.
        kind: as in `Visible`, and so the others.
    """

    batch: int
    num_tokens: int
    table_width: int
    num_masks: int
    kind: Kind
    num_local: int
    max_end: int
    is_paged: bool

    @property
    def _shapes(self) -> list[tuple[int, ...]]:
        """Of the tensors of a `Visible`, in their order."""
        num_words = -(-self.num_local // WORD) if self.num_masks else 0
        return [
            (self.batch, self.num_tokens),
            (self.batch,),
            (self.batch, self.num_tokens),
            (self.batch, self.table_width),
            (self.num_masks, self.num_tokens, num_words),
        ]

    @property
    def size(self) -> int:
        """How many numbers `lay_out` gives."""
        return sum(_aligned(math.prod(shape)) for shape in self._shapes)

    def place(self, numbers: Tensor) -> Visible:
        """Return what `lay_out` has described, as views of its numbers [size], int32."""
        shapes = self._shapes
        parts = torch.split(numbers, [_aligned(math.prod(shape)) for shape in shapes])
        prefix, start, positions, table, bits = (
            part[: math.prod(shape)].view(shape) for part, shape in zip(parts, shapes, strict=True)
        )
        return Visible(
            prefix,
            start,
            positions,
            table,
            bits,
            kind=self.kind,
            num_local=self.num_local,
            max_end=self.max_end,
            is_paged=self.is_paged,
        )


def lay_out(
    prefix_len: Sequence[int] | Sequence[Sequence[int]],
    local: Tensor | None,
    *,
    start: Sequence[int],
    rows: Sequence[int] | None = None,
    pages: Sequence[Sequence[int]] | None = None,
    is_causal: bool = False,
    is_full: bool = False,
    positions: Sequence[Sequence[int]] | None = None,
    num_tokens: int | None = None,
) -> tuple[Layout, list[int]]:
    """Describe who sees whom; the arguments named as in `AttentionPattern` mean what they mean.

    Args:
        prefix_len: [B], or [B][T].
        local: [T, T] or [B, T, T] boolean; None where the new tokens' keys lie in the prefix.
        start: [B] cache position of the first new token's key.
        rows: [B] cache row of each row.
        pages: [B][P] instead of `rows`; shorter lists are filled up.
        is_causal: `local` is the lower triangle.
        is_full: `local` hides nothing.
        positions: [B][T]; None where token t stands at prefix + t.
        num_tokens: T where `local` is None.

    Returns:
        What a kernel is launched for, and the numbers that it reads.

    Raises:
        ConfigError: a prefix that reaches into the new tokens, or no table.
    """
    if (rows is None) == (pages is None):
        raise ConfigError("hybrid_attention: got both rows and pages or none, expected one.")
    width = int(local.shape[-1]) if local is not None else num_tokens or 1
    prefix = [[p] * width if isinstance(p, int) else list(p) for p in prefix_len]
    for row, first in zip(prefix, start, strict=True):
        if max(row) > first or min(row) < 0:
            raise ConfigError(
                f"hybrid_attention: got prefixes of {min(row)} to {max(row)} positions, "
                f"expected at most {first}, where the keys of the new tokens begin."
            )
    if positions is None:
        positions = [[p + t for t, p in enumerate(row)] for row in prefix]
    lists = [[r] for r in rows] if rows is not None else [list(p) for p in pages or ()]
    longest = max(len(p) for p in lists)
    table = [p + [0] * (longest - len(p)) for p in lists]
    kind: Kind = "causal" if is_causal else "bits"
    if is_full or local is None:
        kind = "full"
    masks = pack(local).tolist() if kind == "bits" and local is not None else []
    num_local = 0 if local is None else width
    layout = Layout(
        batch=len(prefix),
        num_tokens=width,
        table_width=longest,
        num_masks=len(masks),
        kind=kind,
        num_local=num_local,
        max_end=max(start) + num_local,
        is_paged=rows is None,
    )
    masks = [[word for mask in masks for token in mask for word in token]]
    numbers: list[int] = []
    for group in (prefix, [start], positions, table, masks):
        numbers += (number for row in group for number in row)
        numbers += [0] * (_aligned(len(numbers)) - len(numbers))
    return layout, numbers


def _aligned(count: int) -> int:
    """Return a count rounded up to 16 bytes: kernels are compiled anew for other addresses."""
    return -(-count // 4) * 4


def pack(local: Tensor) -> Tensor:
    """Return a boolean mask [T, T] or [B, T, T] as words, [1 or B, T, W] int32."""
    local = local if local.ndim == 3 else local[None]
    num_words = -(-local.shape[-1] // WORD)
    padded = torch.nn.functional.pad(local.int(), (0, num_words * WORD - local.shape[-1]))
    powers = torch.ones(WORD, dtype=torch.int64, device=local.device) << torch.arange(
        WORD, device=local.device
    )
    words = (padded.view(*local.shape[:2], num_words, WORD).long() * powers).sum(-1)
    return words.to(torch.int32)  # the highest bit becomes the sign
