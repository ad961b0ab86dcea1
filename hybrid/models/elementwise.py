"""`Elementwise`: what a pass in plain PyTorch computes beside products and attention.

Functions of tensors alone, so that `torch.compile` can make one loop of each. It is off unless
asked for: on the CPUs that were measured, calling what is compiled costs more than that saves
(docs/log.md). Next: hybrid/models/attention.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.errors import ConfigError

# Elements from which on torch divides an operation among threads, at any place in a row. What a
# vector unit leaves over there is computed by other code: of float32 SiLUs one in 25 differs.
_SERIAL_ELEMENTS = 32_768


class Elementwise:
    """Norm, rotation and gate.

    Attributes:
        norm: see `norm`.
        rotate: see `rotate`.
        gate: see `gate`, or `gate_in_parts` where bits must be exact.
    """

    def __init__(self, *, exact: bool = False, compiled: bool = False) -> None:
        """Choose the functions.

        Args:
            exact: give a row the same bits among any others, whatever the number of threads.
            compiled: by torch.compile, at first use. A row's last bits then follow its place among
                the others.

        Raises:
            ConfigError: both, or nothing can be compiled here.
        """
        self.norm: Callable[..., tuple[Tensor, Tensor]] = norm
        self.rotate: Callable[[Tensor, Tensor, Tensor], None] = rotate
        self.gate: Callable[[Tensor], Tensor] = gate_in_parts if exact else gate
        if not compiled:
            return
        if exact:
            raise ConfigError(
                "compile: got it together with exact, expected one of them: what is compiled may "
                "give a row other bits among other rows."
            )
        make = partial(torch.compile, dynamic=True)
        self.norm, self.rotate, self.gate = make(norm), make(rotate), make(gate)
        try:
            self.gate(torch.zeros(2, 4))
        except Exception as error:
            raise ConfigError(
                f"compile: torch.compile does not work here: {error}\n"
                "It needs a C++ compiler. Leave compile out to decode without."
            ) from error


def norm(x: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm of x + update (arXiv:1910.07467) in their dtype, and the sum, both [N, C]."""
    x = x if update is None else x + update
    return F.rms_norm(x, (x.shape[-1],), weight, eps), x


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate x [N, heads, D] in place (arXiv:2104.09864); sin has the sign of the first half."""
    # Rolling by half the width swaps the halves.
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    torch.addcmul(x * cos, swapped, sin, out=x)


def gate(x: Tensor) -> Tensor:
    """Return silu(gate) * up, [N, I] for gate and up side by side [N, 2 I] (arXiv:2002.05202)."""
    left, right = x.chunk(2, dim=-1)
    return F.silu(left).mul_(right)


def gate_in_parts(x: Tensor) -> Tensor:
    """Return the same, in parts that torch does not divide among threads."""
    left, right = x.chunk(2, dim=-1)
    if left.numel() <= _SERIAL_ELEMENTS or x.device.type != "cpu":
        return gate(x)
    rows = max(1, _SERIAL_ELEMENTS // left.shape[1])
    return torch.cat([F.silu(part) for part in torch.split(left, rows)]).mul_(right)
