"""`Linear`: y = x W^T + b, the weight dense or as packed 4-bit blocks; nothing above knows which.

Packed layers take bfloat16 activations. Their rows are bit-identical whatever the number of rows,
which is what makes a row of a batch independent of the others.
Next: hybrid/models/transformer.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.models.checkpoint import Int4Blocks

GROUP = 32
# The matrix library is slower on 2 to 7 float32 rows than on 8, and gives each row the same bits
# from 4 rows on.
_MIN_ROWS = 8


class Linear:
    """A linear layer [I] -> [O]."""

    out_features: int

    def __call__(self, x: Tensor) -> Tensor:
        """Return [N, O] for x [N, I]."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        raise NotImplementedError


class DenseLinear(Linear):
    """Weight [O, I] in the activations' dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Hold `weight` [O, I] and `bias` [O]."""
        self.weight, self.bias = weight, bias
        self.out_features = weight.shape[0]
        self._pads = weight.device.type == "cpu" and weight.dtype == torch.float32

    def __call__(self, x: Tensor) -> Tensor:
        """Return [N, O] for x [N, I]."""
        rows = x.shape[0]
        if self._pads and 1 < rows < _MIN_ROWS:
            padded = x.new_zeros(_MIN_ROWS, x.shape[1])
            padded[:rows] = x
            return F.linear(padded, self.weight, self.bias)[:rows]
        return F.linear(x, self.weight, self.bias)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self.weight.numel() * self.weight.element_size()


class Int4Linear(Linear):
    """Weight as 4-bit blocks of 32 along the input, for torch's packed CPU kernel.

    The kernel computes (q - 8) * scale + zero, so a GGUF Q4_1 block q * d + m goes in unchanged
    with scale = d and zero = m + 8 d.
    """

    def __init__(self, blocks: Sequence[Int4Blocks], bias: Tensor | None = None) -> None:
        """Pack `blocks`, stacked along the output."""
        quants = torch.cat([b.quants for b in blocks])
        d = torch.cat([b.d for b in blocks]).float()
        m = torch.cat([b.m for b in blocks]).float()
        self.out_features = quants.shape[0]
        nibbles = torch.stack([quants & 15, quants >> 4], dim=-1).flatten(1).to(torch.int32)
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(nibbles, 2)
        scales = torch.stack([d, m + 8 * d], dim=-1).transpose(0, 1)
        self._scales = scales.contiguous().to(torch.bfloat16)  # [I/32, O, 2]
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return [N, O] for x [N, I] in bfloat16."""
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self._packed, GROUP, self._scales)
        return y if self.bias is None else y.add_(self.bias)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self._packed.numel() + 2 * self._scales.numel()


def make_linear(weights: Sequence[Tensor | Int4Blocks], biases: Sequence[Tensor | None]) -> Linear:
    """Return one layer for several weights stacked along the output (fused QKV, gate and up).

    Blocks that cannot be packed together with a dense neighbour are dequantised to its dtype.
    """
    bias = torch.cat([b for b in biases if b is not None]) if biases[0] is not None else None
    blocks = [w for w in weights if isinstance(w, Int4Blocks)]
    if len(blocks) == len(weights):
        return Int4Linear(blocks, bias)
    dtype = next(w.dtype for w in weights if isinstance(w, Tensor))
    dense = [w if isinstance(w, Tensor) else w.dequantize(dtype) for w in weights]
    return DenseLinear(torch.cat(dense) if len(dense) > 1 else dense[0], bias)
