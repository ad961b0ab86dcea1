"""Where every launcher gets its outputs, so that a test can see which elements were written."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid.config import poison_enabled


def empty(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised tensor; with ``HYBRID_POISON=1`` one that no result looks like.

    Poison is NaN for floats, the largest value for integers, True for booleans.
    """
    out = torch.empty(tuple(shape), dtype=dtype, device=device)
    if poison_enabled():
        if dtype.is_floating_point:
            out.fill_(float("nan"))
        else:
            out.fill_(True if dtype == torch.bool else torch.iinfo(dtype).max)
    return out
