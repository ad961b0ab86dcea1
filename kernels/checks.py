"""What a launcher checks before it hands addresses to a GPU, which would not."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid.errors import ConfigError


def require(condition: bool, op: str, problem: str) -> None:
    """Check that a kernel can run.

    Raises:
        ConfigError: it cannot.
    """
    if not condition:
        raise ConfigError(f"{op}: {problem}")


def require_tensor(
    op: str, name: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device
) -> None:
    """Check where a tensor lies and what shape it has.

    Raises:
        ConfigError: it lies elsewhere, has another shape, or wants a gradient: kernels have none.
    """
    found = f"{name} is {list(tensor.shape)} on {tensor.device}"
    expected = f"expected {list(shape)} on {device}."
    require(tuple(tensor.shape) == shape and tensor.device == device, op, f"{found}, {expected}")
    require(
        not (tensor.requires_grad and torch.is_grad_enabled()),
        op,
        f"{name} requires a gradient and the kernel has none. Run it under torch.no_grad(), or "
        f"train with dispatch.force({op!r}, 'reference').",
    )


def require_dtype(op: str, name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    """Check the dtype of a tensor, without `dtypes` that it is one that kernels compute with.

    Raises:
        ConfigError: it is another.
    """
    expected = dtypes or (torch.float32, torch.float16, torch.bfloat16)
    names = " or ".join(map(str, expected))
    require(tensor.dtype in expected, op, f"{name} is {tensor.dtype}, expected {names}.")
