"""What crosses between host and device: small tensors there, one packed tensor back per step.

On a GPU the host must not wait for the device but where it has to branch. So who decides is said
here, and the steps of decoding send and read through here. Next: hybrid/sampling.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybrid.kernels import dispatch

DECISIONS = "decisions"
"""Under this name `dispatch.force` says who decides: "triton" is the device, "reference" the
host."""


@dataclass(frozen=True, slots=True)
class DeviceVerdict:
    """A verdict that still lies on the device: the step reads it with all else that it reads.

    Attributes:
        num_accepted: [B] integers, as in `Verdict`; -1 where the drafter says that the token which
            it drew is impossible.
        next_token: [B] integers; -1 where there is no law to draw it from.
    """

    num_accepted: Tensor
    next_token: Tensor


def decides_on_device(device: torch.device) -> bool:
    """Return whether tokens are chosen, drawn and judged where the logits are.

    They are where kernels run. Elsewhere the host decides, in float64: on a CPU looking costs
    nothing, and the rules on the host are those that the tests enumerate.
    """
    return dispatch.choose(DECISIONS, device) == "triton"


def send(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """Return (nested) numbers as a tensor on a device, without waiting for what runs there."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def take_rows(tensors: Mapping[int, Tensor], rows: Sequence[int]) -> dict[int, Tensor]:
    """Return some rows of tensors [B, ...] by name, without the wait of `tensor[rows]`.

    An index that is a list crosses to the device as other numbers do, but blocks until it is there.
    """
    return {name: t.index_select(0, send(rows, t.device)) for name, t in tensors.items()}


def read(tensors: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Return tensors as (nested) lists; all that lie on one device come in one transfer.

    float64 holds every id and every float32 exactly.
    """
    away = {name: t for name, t in tensors.items() if decides_on_device(t.device)}
    values = {name: t.tolist() for name, t in tensors.items() if name not in away}
    if away:
        packed = torch.cat([t.double().flatten() for t in away.values()]).cpu()
        start = 0
        for name, tensor in away.items():
            part = packed[start : start + tensor.numel()]
            values[name] = part.view(tensor.shape).to(tensor.dtype).tolist()
            start += tensor.numel()
    return values
