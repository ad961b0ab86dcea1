"""`Grid`: where the blocks of a block-causal model lie. Next: drafters/denoise/block_cache.py."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Grid:
    """Blocks of one size. What lies before the first of them is a block of its own.

    Attributes:
        size: positions of a block.
        origin: start of the first one; 0 puts blocks at absolute positions.
    """

    size: int
    origin: int = 0

    def start(self, position: int) -> int:
        """Return the first position of the block that holds `position`."""
        if position < self.origin:
            return 0
        return position - (position - self.origin) % self.size

    def end(self, position: int) -> int:
        """Return the end of the block that holds `position`."""
        return self.origin if position < self.origin else self.start(position) + self.size

    def ids(self, positions: Tensor) -> Tensor:
        """Return the number of the block of each position [T]; -1 lies before the first."""
        return (positions - self.origin).div(self.size, rounding_mode="floor").clamp(min=-1)
