"""Which implementation of an operation runs: Triton on a GPU that has it, else plain PyTorch.

`kernels/<op>/__init__.py` asks `choose` and calls what it names. What was forced and what ran last
are kept per thread of execution (`contextvars`), for tests and `hybrid doctor`; nothing else is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from hybrid.config import interprets_triton
from hybrid.errors import ConfigError, KernelUnavailableError

Implementation = Literal["triton", "reference"]

OLDEST = (8, 0)  # bfloat16 products and asynchronous copies
_EVERY = "*"  # an operation of this name stands for all

_forced: ContextVar[Mapping[str, Implementation]] = ContextVar("forced", default={})  # noqa: B039
_last: ContextVar[Mapping[str, Implementation]] = ContextVar("last", default={})  # noqa: B039


def choose(op: str, device: torch.device) -> Implementation:
    """Return what runs `op` on `device`, and remember it for `last`.

    Raises:
        KernelUnavailableError: Triton is forced and cannot run on `device`.
    """
    forced = _forced.get()
    implementation = forced.get(op, forced.get(_EVERY))
    if implementation is None:
        implementation = "reference" if why_not_triton(device) else "triton"
    elif implementation == "triton" and not interprets_triton():
        _require(op, device)
    if _last.get().get(op) != implementation:
        _last.set({**_last.get(), op: implementation})
    return implementation


@contextmanager
def force(op: str | None, implementation: Implementation) -> Iterator[None]:
    """Make `choose` return `implementation` inside the block; None as `op` means every operation.

    Triton's interpreter (``TRITON_INTERPRET=1``) counts as able to run, slowly, on a CPU.

    Raises:
        ConfigError: there is no such implementation.
        KernelUnavailableError: Triton is forced and no device here can run it.
    """
    if implementation not in ("triton", "reference"):
        raise ConfigError(f"kernel: got {implementation!r}, expected 'triton' or 'reference'.")
    if implementation == "triton" and not interprets_triton():
        _require(op or "every operation", default_device())
    token = _forced.set({**_forced.get(), op or _EVERY: implementation})
    try:
        yield
    finally:
        _forced.reset(token)


def last(op: str) -> Implementation | None:
    """Return what `choose` last said for `op`, None before its first call."""
    return _last.get().get(op)


def listing() -> list[tuple[str, Implementation, str]]:
    """Return (operation, what runs it here, why) for every operation that has a kernel."""
    reason = why_not_triton(default_device())
    here: Implementation = "reference" if reason else "triton"
    return [(op, here, reason or "compiled for this GPU") for op in operations()]


def operations() -> list[str]:
    """Return the operations that have a Triton kernel, by name."""
    return sorted(path.parent.name for path in Path(__file__).parent.glob("*/triton.py"))


def default_device() -> torch.device:
    """Return the GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@cache
def why_not_triton(device: torch.device) -> str | None:
    """Return why Triton's kernels do not run on `device`, None if they do."""
    if device.type != "cuda":
        return "no GPU" if device.type == "cpu" else f"no kernels for {device.type}"
    if find_spec("triton") is None:
        return "triton is not installed"
    if torch.version.hip is not None:
        return "tested for NVIDIA only"
    if (capability := torch.cuda.get_device_capability(device)) < OLDEST:
        have, need = (".".join(map(str, c)) for c in (capability, OLDEST))
        return f"the GPU has compute capability {have}, the kernels need {need}"
    return None


def _require(op: str, device: torch.device) -> None:
    if reason := why_not_triton(device):
        raise KernelUnavailableError(
            f"Triton kernel for {op}: cannot run on {device}: {reason}. Do not force it, or set "
            f"TRITON_INTERPRET=1 before Python starts to interpret it on the CPU."
        )
