"""What every cache knows of its rows: how long each is, and how long it may become."""

from __future__ import annotations

from hybrid.errors import CapacityError


class Rows:
    """Lengths and capacity of a cache's rows, and the checks that go with them.

    Attributes:
        lengths: committed positions per row.
        capacity: the most positions of a row.
    """

    def __init__(self, batch: int, capacity: int) -> None:
        """Begin with `batch` empty rows."""
        self.lengths = [0] * batch
        self.capacity = capacity

    def require(self, row: int, num_tokens: int) -> None:
        """Check that `num_tokens` more positions fit.

        Raises:
            CapacityError: they do not.
        """
        needed = self.lengths[row] + num_tokens
        if needed > self.capacity:
            raise CapacityError(
                f"KV cache: row {row} needs {needed} positions, got a cache of {self.capacity}. "
                "Shorten the prompt or allocate more."
            )

    def require_committed(self, row: int, end: int) -> None:
        """Check that positions up to `end` (exclusive) are committed.

        Raises:
            CapacityError: they are not.
        """
        if end > self.lengths[row]:
            raise CapacityError(
                f"KV cache: cannot refresh row {row} up to position {end}, it holds "
                f"{self.lengths[row]}."
            )

    def require_length(self, row: int, length: int) -> None:
        """Check that the row can be cut to `length`.

        Raises:
            CapacityError: it is shorter, or `length` is negative.
        """
        if not 0 <= length <= self.lengths[row]:
            raise CapacityError(
                f"KV cache: cannot truncate row {row} to {length}, it holds {self.lengths[row]}."
            )
