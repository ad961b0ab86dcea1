"""A linear layer in plain PyTorch, in products of one number of rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

TILE_ROWS = 16


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b; see `linear`."""
    return in_tiles(lambda tile: F.linear(tile, weight, bias), x)


def in_tiles(multiply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a product to `TILE_ROWS` rows at a time, the last ones filled up with zeros.

    A library chooses its code, and with it the order of its sums, by the shape of a product. One
    shape for any number of rows is one order; a row's place among them changes nothing (tested).

    Args:
        multiply: [TILE_ROWS, I] -> [TILE_ROWS, O].
        x: [N, I].

    Returns:
        [N, O].
    """
    tiles = torch.split(F.pad(x, (0, 0, 0, -len(x) % TILE_ROWS)), TILE_ROWS)
    outs = [multiply(tile) for tile in tiles]
    return (outs[0] if len(outs) == 1 else torch.cat(outs))[: len(x)]
