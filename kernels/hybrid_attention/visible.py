"""`Visible`: who sees which keys in one pass, as tensors that a kernel reads.

It is what `hybrid.attention.pattern.AttentionPattern` says, and where the keys lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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
    def build(
        cls,
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
        device: torch.device,
    ) -> Visible:
        """Make one; the arguments named as in `AttentionPattern` mean what they mean there.

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
            device: where the tensors go, in one copy.

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
        groups = [prefix, [[s] for s in start], [list(p) for p in positions], table]
        numbers = torch.tensor([n for g in groups for row in g for n in row], dtype=torch.int32)
        sizes = [len(g) * len(g[0]) for g in groups]
        parts = torch.split(numbers.to(device), sizes)
        tensors = [p.view(len(g), -1) for p, g in zip(parts, groups, strict=True)]
        num_local = 0 if local is None else width
        kind: Kind = "causal" if is_causal else "bits"
        if is_full or local is None:
            kind = "full"
        empty = torch.empty(0, width, 0, dtype=torch.int32, device=device)
        bits = pack(local).to(device) if kind == "bits" and local is not None else empty
        return cls(
            prefix=tensors[0],
            start=tensors[1].view(-1),
            positions=tensors[2],
            table=tensors[3],
            bits=bits,
            kind=kind,
            num_local=num_local,
            max_end=max(start) + num_local,
            is_paged=rows is None,
        )

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
