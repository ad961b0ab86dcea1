"""How a kernel is started: tuned where there is a driver, else with its first configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hybrid.config import interprets_triton

Grid = tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]]


def launch(
    kernel: Any,
    grid: Grid,
    *args: Any,
    configs: Sequence[Any],
    key: Sequence[str],
    restore: Sequence[str] = (),
    **kwargs: Any,
) -> None:
    """Run `kernel[grid](*args, **kwargs)` with the fastest of `configs` for the values of `key`.

    Tuning measures, so two runs may choose differently: where bits must not change from one to the
    next, or with the number of rows, pass one configuration.

    Args:
        kernel: bare `@triton.jit` function.
        grid: programs, or a function of the kernel's compile-time arguments.
        args: of the kernel.
        configs: `triton.Config`s; the first is used where nothing can be measured.
        key: arguments whose values choose among them. No count of rows.
        restore: arguments that the kernel reads and overwrites, kept whole while it is measured.
        kwargs: of the kernel.
    """
    with _on_the_device_of(args):
        if len(configs) > 1 and not interprets_triton():
            tuned = _tuned(kernel, tuple(configs), tuple(key), tuple(restore))
            tuned[grid](*args, **kwargs)
        else:
            kernel[grid](*args, **kwargs, **configs[0].all_kwargs())


def _on_the_device_of(args: Sequence[Any]) -> AbstractContextManager[Any]:
    """Triton starts kernels on the current GPU, wherever their tensors lie: make theirs current."""
    devices = (arg.device for arg in args if isinstance(arg, Tensor) and arg.is_cuda)
    device = next(devices, None)
    return nullcontext() if device is None else torch.cuda.device(device)


@cache
def _tuned(
    kernel: Any, configs: tuple[Any, ...], key: tuple[str, ...], restore: tuple[str, ...]
) -> Any:
    import triton

    return triton.autotune(list(configs), key=list(key), restore_value=list(restore))(kernel)
