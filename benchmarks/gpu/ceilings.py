"""What this card can do at most: bytes copied and read, matrix products; all else is a share of it.

Next: benchmarks/gpu/kernel_times.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.session import Session
from benchmarks.gpu.timing import Timer

COPY_BYTES = 2 * 2**30
WIDTH = 8192


def run(session: Session) -> None:
    """Measure; each record has GB/s or TFLOP/s."""
    timer = Timer(session.device)
    num_bytes, width = (2**16, 64) if session.is_dry else (COPY_BYTES, WIDTH)
    _copy_and_sum(session, timer, num_bytes)
    _product_with_vector(session, timer, num_bytes, width)
    for dtype in {session.dtype: 0, torch.float32: 0}:  # in this order, each once
        _product(session, timer, dtype, width)


def _copy_and_sum(session: Session, timer: Timer, num_bytes: int) -> None:
    source = _normal(session, torch.float32, num_bytes // 4)
    target = torch.empty_like(source)
    _bandwidth(session, "copy", 2 * num_bytes, timer(lambda: target.copy_(source)))
    _bandwidth(session, "read, sum", num_bytes, timer(lambda: source.sum()))


def _product_with_vector(session: Session, timer: Timer, num_bytes: int, width: int) -> None:
    rows = _normal(session, session.dtype, num_bytes // session.dtype.itemsize // width, width)
    vector = rows[0].clone()
    times = timer(lambda: rows @ vector)
    _bandwidth(session, "read, product with a vector", num_bytes, times)


def _product(session: Session, timer: Timer, dtype: torch.dtype, width: int) -> None:
    a, b = _normal(session, dtype, 2, width, width)
    times = timer(lambda: a @ b)
    rate = 2 * width**3 / times["median"] / 1e6
    name = f"product, {str(dtype).removeprefix('torch.')}"
    session.add(kind="ceiling", name=name, tflops=rate, microseconds=times)


def _normal(session: Session, dtype: torch.dtype, *shape: int) -> Tensor:
    out = torch.empty(shape, dtype=dtype, device=session.device)
    return out.normal_(generator=session.generator())


def _bandwidth(session: Session, name: str, num_bytes: int, times: dict[str, Any]) -> None:
    rate = num_bytes / times["median"] / 1e3
    session.add(kind="ceiling", name=name, gbytes_per_s=rate, microseconds=times)
