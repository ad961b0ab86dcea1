"""Counts how often a step waits for the device, on a machine that has none.

Where the device decides, values reach the host through `hybrid.transfer.read` alone. Here that is
counted, and every other look at a tensor's values is a stray: `tolist`, `item`, `bool`, an
operation whose result has a size that follows from values. So is what waits for the device until
numbers have reached it: an index that is a list, `torch.tensor` with a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid import transfer
from hybrid.decode import judging, slots
from hybrid.kernels import dispatch
from hybrid.router import hybrid
from hybrid.verifiers import on_device

OPERATIONS = ("logits_stats", "philox", "sample", "verify")
LOOKS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "numpy", "cpu")
READING = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "bincount", "_unique2")


@contextmanager
def deciding_on_device(implementation: Any = "reference") -> Iterator[None]:
    """Let the "device" decide, by the kernels' plain PyTorch or their Triton; the rest as ever."""
    with ExitStack() as stack:
        stack.enter_context(dispatch.force(transfer.DECISIONS, "triton"))
        for op in OPERATIONS:
            stack.enter_context(dispatch.force(op, implementation))
        yield


@dataclass
class Reads(TorchDispatchMode):
    """What was seen.

    Attributes:
        num_reads: calls of `read` since the start.
        strays: other looks, by what they were.
    """

    num_reads: int = 0
    strays: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._depth = 0

    def allowed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function; what it looks at is not a stray."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1

        return call

    def see(self, what: str) -> None:
        """Take note of a look."""
        if not self._depth:
            self.strays.append(what)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = args[1] if name.startswith("index") and isinstance(args[1], (list, tuple)) else ()
        if name in READING or any(m is not None and m.dtype == torch.bool for m in masks):
            self.see(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def counting(*hosts: tuple[Any, str]) -> Iterator[Reads]:
    """Count the reads.

    Args:
        hosts: (object, name) of functions whose looks are not the step's.
    """
    reads = Reads()

    def counted(tensors: Any) -> Any:
        reads.num_reads += 1
        return reads.allowed(transfer.read)(tensors)

    with ExitStack() as stack:
        for module in (judging, slots, hybrid):
            stack.enter_context(mock.patch.object(module, "read", counted))
        # F.one_hot looks at its input on a CPU.
        for owner, name in ((on_device, "verify"), *hosts):
            quiet = reads.allowed(getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, quiet))
        for name in ("__getitem__", "__setitem__"):
            plain = getattr(torch.Tensor, name)

            def index(self: Any, where: Any, *value: Any, plain: Any = plain) -> Any:
                parts = where if isinstance(where, tuple) else (where,)
                if any(isinstance(part, (list, range)) for part in parts):
                    reads.see("index of a list")
                return plain(self, where, *value)

            stack.enter_context(mock.patch.object(torch.Tensor, name, index))
        make = torch.tensor

        def tensor(*args: Any, **given: Any) -> Any:
            if given.get("device") is not None:
                reads.see("tensor on a device")
            return make(*args, **given)

        stack.enter_context(mock.patch.object(torch, "tensor", tensor))
        for name in LOOKS:
            plain = getattr(torch.Tensor, name)

            def look(self: Any, *args: Any, name: str = name, plain: Any = plain) -> Any:
                reads.see(name)
                return plain(self, *args)

            stack.enter_context(mock.patch.object(torch.Tensor, name, look))
        stack.enter_context(reads)
        yield reads
