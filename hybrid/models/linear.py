"""`Linear`: y = x W^T + b, the weight dense or in packed blocks; nothing above knows which.

Packed layers compute in bfloat16. Their rows are bit-identical whatever the number of rows,
which is what makes a row of a batch independent of the others.
Next: hybrid/models/transformer.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.errors import ConfigError
from hybrid.kernels import dispatch
from hybrid.kernels.linear import in_tiles, linear
from hybrid.models.checkpoint import INT4_GROUP, Int4Blocks, Int8Blocks, Weight

# The CPU's matrix library rounds a row differently by the number of rows beside it, least often in
# whole tiles: on one CPU any number of rows from 2 on gave the same bits in bfloat16 and multiples
# of 4 in float32, on another (AMX) one number in 10^5 differs. On 2 to 7 float32 rows it is also
# slower than on 8.
_TILE_ROWS = {torch.bfloat16: 2, torch.float32: 4}
_MIN_FLOAT32_ROWS = 8
PACKED_ROWS = 16  # the 4-bit kernel takes multiples


class Linear:
    """A linear layer [I] -> [O].

    Attributes:
        bias: [O] or None.
    """

    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return [N, O] for x [N, I]."""
        raise NotImplementedError

    def shares(self, base: Linear) -> bool:
        """Return whether `behind` can compute this layer and `base` in one product."""
        return self is base

    def behind(self, num_base: int, x: Tensor) -> Tensor:
        """Return [N, O]: the first rows as the base layer gives them. Only where this `shares`."""
        return self(x)

    def dense(self) -> Tensor:
        """Return the weight [O, I] as the layer computes with it."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        raise NotImplementedError


class DenseLinear(Linear):
    """Weight [O, I] in the activations' dtype."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        steady: bool = False,
        exact: bool = False,
    ) -> None:
        """Hold `weight` [O, I] and `bias` [O].

        Args:
            weight: dense.
            bias: or None.
            steady: on a CPU, give a lone float32 row the code that it has among a few others. That
                costs a product of 8 rows for one.
            exact: give a row the bits that it has among any others: products of one number of rows
                on a CPU, a kernel of fixed tiles on a GPU.

        Raises:
            ConfigError: exact on a GPU that has no such kernel.
        """
        self.weight, self.bias = weight, bias
        on_cpu = weight.device.type == "cpu"
        if exact and not on_cpu and (reason := dispatch.why_not_triton(weight.device)):
            raise ConfigError(
                f"exact: got device {weight.device}, where its kernels do not run: {reason}. "
                "Use device='cpu', or leave exact out."
            )
        self._tile = _TILE_ROWS.get(weight.dtype, 1) if on_cpu else 1
        is_float32 = weight.dtype == torch.float32
        self._min_rows = _MIN_FLOAT32_ROWS if on_cpu and is_float32 else self._tile
        self._is_exact, self._keeps_lone_row = exact, is_float32 and not steady

    def __call__(self, x: Tensor) -> Tensor:
        """Return [N, O] for x [N, I]."""
        if self._is_exact:
            return linear(x, self.weight, self.bias)
        rows = x.shape[0]
        wanted = max(self._min_rows, -(-rows // self._tile) * self._tile)
        if wanted == rows or (rows == 1 and self._keeps_lone_row):
            return F.linear(x, self.weight, self.bias)
        padded = x.new_zeros(wanted, x.shape[1])
        padded[:rows] = x
        return F.linear(padded, self.weight, self.bias)[:rows]

    def dense(self) -> Tensor:
        """Return the weight itself."""
        return self.weight

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self.weight.numel() * self.weight.element_size()


class StackedLinear(Linear):
    """Several dense layers of one input side by side, where their weights belong to somebody else.

    What `DenseLinear` computes of their copies in one tensor, in as many products as there are
    layers; the weights stay where they are.
    """

    def __init__(self, parts: Sequence[DenseLinear]) -> None:
        """Hold layers [I] -> [O_i], with a bias each or none at all."""
        self.parts = parts
        biases = [part.bias for part in parts if part.bias is not None]
        self.bias = torch.cat(biases) if biases else None

    def __call__(self, x: Tensor) -> Tensor:
        """Return [N, sum of O_i] for x [N, I]."""
        return torch.cat([part(x) for part in self.parts], dim=-1)

    def dense(self) -> Tensor:
        """Return the weight [sum of O_i, I], a copy."""
        return torch.cat([part.weight for part in self.parts])

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(part.nbytes for part in self.parts)


class ReorderedLinear(Linear):
    """Weight in the order that the CPU library's own kernels read (oneDNN), for inference.

    A product of a few rows then costs little more than one of a single row, where the plain layout
    is copied in every call. Measured on one core at the default model's shapes, beside
    `DenseLinear`: 2.5 times faster for 1 to 9 rows of float32, 1.1 to 1.7 times for bfloat16. In
    float32 the bits of a row have been the same among any number of rows from 2 on.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        steady: bool = False,
        exact: bool = False,
    ) -> None:
        """Copy `weight` [O, I]; `bias` is [O]. `steady` and `exact` as for `DenseLinear`."""
        self._shape, self.bias = tuple(weight.shape), bias
        reorder = torch.ops.mkldnn._reorder_linear_weight
        self._weight: Tensor = reorder(weight.contiguous(), None)
        self._is_exact = exact
        self._keeps_lone_row = weight.dtype == torch.float32 and not steady

    @staticmethod
    def runs(device: torch.device, dtype: torch.dtype) -> bool:
        """Whether this build of torch and this CPU have the kernels."""
        names = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
        if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return False
        if not all(hasattr(torch.ops.mkldnn, name) for name in names):
            return False
        has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(has_bfloat16))

    def __call__(self, x: Tensor) -> Tensor:
        """Return [N, O] for x [N, I]."""
        if self._is_exact:
            return in_tiles(self._multiply, x)
        rows = x.shape[0]
        if rows == 1 and not self._keeps_lone_row:  # alone it would be summed in another order
            x = torch.cat([x, x])
        return self._multiply(x)[:rows]

    def _multiply(self, x: Tensor) -> Tensor:
        multiply = torch.ops.mkldnn._linear_pointwise
        y: Tensor = multiply(x, self._weight, self.bias, "none", [], "")
        return y

    def dense(self) -> Tensor:
        """Return the weight [O, I], read off the layer's answers to unit vectors."""
        unit = torch.eye(self._shape[1], dtype=self._weight.dtype)
        multiply = torch.ops.mkldnn._linear_pointwise
        columns: Tensor = multiply(unit, self._weight, None, "none", [], "")
        return columns.T

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self._shape[0] * self._shape[1] * self._weight.dtype.itemsize


class PackedLinear(Linear):
    """Weight in blocks of 32 along the input, for torch's packed 4-bit CPU kernel.

    The kernel computes (q - 8) * scale + zero with scale and zero rounded to bfloat16. A GGUF Q4_1
    block q * d + m goes in with its own levels q, scale = d and zero = m + 8 d. A Q8_0 block q * d
    goes in as two layers of nibbles side by side, 16 d (q >> 4) + d (q & 15), over the input
    repeated.
    """

    def __init__(
        self,
        blocks: Sequence[Int4Blocks | Int8Blocks],
        bias: Tensor | None = None,
    ) -> None:
        """Pack `blocks`, all of one kind, stacked along the output."""
        parts = [_nibbles(b) for b in blocks]
        nibbles, scale, zero = (torch.cat(part) for part in zip(*parts, strict=True))
        self._repeats = isinstance(blocks[0], Int8Blocks)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(nibbles.to(torch.int32), 2)
        self._packed: Tensor = packed
        scales = torch.stack([scale, zero], dim=-1).transpose(0, 1)
        self._scales = scales.contiguous().to(torch.bfloat16)  # [I/32, O, 2]
        self._in_features = blocks[0].shape[1]
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return [N, O] for x [N, I]; computed in bfloat16, returned in the dtype of x."""
        if x.dtype != torch.bfloat16:
            return self(x.bfloat16()).to(x.dtype)
        if self._repeats:
            x = torch.cat([x, x], dim=-1)
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        y: Tensor = multiply(x, self._packed, INT4_GROUP, self._scales)
        return y if self.bias is None else y.add_(self.bias)

    def dense(self) -> Tensor:
        """Return the weight [O, I] in bfloat16, read off the layer's answers to unit vectors."""
        columns = self(torch.eye(self._in_features, dtype=torch.bfloat16)).T
        return columns if self.bias is None else columns - self.bias[:, None]

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self._packed.numel() + 2 * self._scales.numel()


def _nibbles(blocks: Int4Blocks | Int8Blocks) -> tuple[Tensor, Tensor, Tensor]:
    """Return nibbles [O, I'] uint8 and their scale and zero [O, I'/32] float32."""
    d = blocks.d.float()
    if isinstance(blocks, Int4Blocks):
        nibbles = torch.stack([blocks.quants & 15, blocks.quants >> 4], dim=-1).flatten(1)
        return nibbles, d, blocks.m.float() + 8 * d
    high, low = (blocks.quants >> 4) + 8, blocks.quants & 15  # 0..15 both
    nibbles = torch.cat([high, low], dim=1).to(torch.uint8)
    return nibbles, torch.cat([16 * d, d], dim=1), torch.cat([torch.zeros_like(d), 8 * d], dim=1)


def make_linear(
    weights: Sequence[Weight],
    biases: Sequence[Tensor | None],
    *,
    steady: bool = False,
    exact: bool = False,
    reorder: bool = False,
    share: bool = False,
) -> Linear:
    """Return one layer for several weights stacked along the output (fused QKV, gate and up).

    Blocks that cannot be packed (beside a dense neighbour, or a number of rows that the kernel does
    not take) are dequantised.

    Args:
        weights: [O_i, I] each.
        biases: [O_i] each, or all None.
        steady: see `DenseLinear`; and so `exact`, which packed layers are anyway.
        exact: likewise.
        reorder: take `ReorderedLinear` for dense weights where it runs.
        share: take `StackedLinear` for several dense weights, which copies none of them.
    """
    own = [w for w in weights if isinstance(w, Tensor)]
    if share and len(own) == len(weights) > 1:
        pairs = zip(own, biases, strict=True)
        return StackedLinear([DenseLinear(w, b, steady=steady, exact=exact) for w, b in pairs])
    bias = torch.cat([b for b in biases if b is not None]) if biases[0] is not None else None
    for kind in (Int4Blocks, Int8Blocks):
        blocks = [w for w in weights if isinstance(w, kind)]
        if len(blocks) == len(weights) and sum(w.shape[0] for w in blocks) % PACKED_ROWS == 0:
            return PackedLinear(blocks, bias)
    dtype = next((w.dtype for w in weights if isinstance(w, Tensor)), torch.bfloat16)
    dense = [w if isinstance(w, Tensor) else w.dequantize(dtype) for w in weights]
    weight = torch.cat(dense) if len(dense) > 1 else dense[0]
    fits = reorder and ReorderedLinear.runs(weight.device, weight.dtype)
    return (ReorderedLinear if fits else DenseLinear)(weight, bias, steady=steady, exact=exact)
