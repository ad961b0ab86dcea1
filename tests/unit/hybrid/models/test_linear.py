"""Linear layers against float64 products, and the promise that a row's bits are its own."""

from __future__ import annotations

import pytest
import torch

from hybrid.models.checkpoint import INT4_GROUP, Int4Blocks, Int8Blocks
from hybrid.models.linear import DenseLinear, PackedLinear, make_linear

O, I = 96, 128  # noqa: E741  (the shape letters of the glossary)


def int4_blocks(rows: int = O, seed: int = 0) -> Int4Blocks:
    draw = torch.Generator().manual_seed(seed)
    quants = torch.randint(0, 256, (rows, I // 2), generator=draw, dtype=torch.uint8)
    d = torch.rand(rows, I // INT4_GROUP, generator=draw) * 0.02
    return Int4Blocks(quants, d.half(), (-8 * d).half())


def int8_blocks(seed: int = 0) -> Int8Blocks:
    draw = torch.Generator().manual_seed(seed)
    quants = torch.randint(-128, 128, (O, I), generator=draw).to(torch.int8)
    return Int8Blocks(quants, (torch.rand(O, I // INT4_GROUP, generator=draw) * 0.01).half())


@pytest.mark.parametrize("blocks", [int4_blocks(), int8_blocks()], ids=["int4", "int8"])
def test_packed_equals_the_product_with_the_dequantised_weight(blocks):
    x = torch.randn(5, I, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = x.double() @ blocks.dequantize(torch.float64).T
    error = (PackedLinear([blocks])(x).double() - expected).norm() / expected.norm()
    # Scales and results are bfloat16: 8 bits of mantissa.
    assert error < 2**-7


def test_int8_extremes_are_exact():
    """Every level -128..127 with a scale that bfloat16 holds: the two nibbles join exactly."""
    quants = torch.zeros(256, INT4_GROUP, dtype=torch.int8)
    quants[:, 0] = torch.arange(-128, 128).to(torch.int8)
    layer = PackedLinear([Int8Blocks(quants, torch.full((256, 1), 0.5).half())])
    x = torch.zeros(1, INT4_GROUP).bfloat16()
    x[0, 0] = 1
    assert torch.equal(layer(x)[0].float(), torch.arange(-128, 128) * 0.5)


def test_stacked_layers_and_biases():
    parts, bias = [int4_blocks(seed=1), int4_blocks(32, seed=2)], torch.randn(O + 32).bfloat16()
    x = torch.randn(3, I).bfloat16()
    fused = make_linear(parts, [bias[:O], bias[O:]])(x)
    alone = [make_linear([p], [b])(x) for p, b in zip(parts, bias.split([O, 32]), strict=True)]
    assert torch.equal(fused, torch.cat(alone, dim=1))


def test_a_mixture_of_kinds_is_dequantised():
    blocks, dense = int4_blocks(), torch.randn(O, I)
    layer = make_linear([blocks, dense], [None, None])
    assert isinstance(layer, DenseLinear)
    assert torch.equal(layer.weight, torch.cat([blocks.dequantize(torch.float32), dense]))
    both = make_linear([blocks, int8_blocks()], [None, None])
    assert isinstance(both, DenseLinear)
    assert both.weight.dtype == torch.bfloat16


def layers() -> dict[str, tuple[object, torch.dtype]]:
    draw = torch.Generator().manual_seed(3)
    weight = torch.randn(O, 1536, generator=draw)
    return {
        "float32-exact": (DenseLinear(weight, exact=True), torch.float32),
        "bfloat16": (DenseLinear(weight.bfloat16()), torch.bfloat16),
        "int4": (PackedLinear([int4_blocks()]), torch.bfloat16),
        "int8": (PackedLinear([int8_blocks()]), torch.bfloat16),
    }


@pytest.mark.parametrize("kind", layers())
@pytest.mark.parametrize("threads", [1, 2])
def test_a_rows_bits_do_not_depend_on_the_other_rows(kind, threads):
    layer, dtype = layers()[kind]
    width = 1536 if isinstance(layer, DenseLinear) else I
    x = torch.randn(16, width, generator=torch.Generator().manual_seed(4)).to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = layer(x)
        for rows in (1, 2, 3, 5, 8, 9, 13):
            assert torch.equal(layer(x[:rows]), whole[:rows]), rows
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [1, 65, 96])
def test_rows_that_the_kernel_does_not_take_are_dequantised(rows):
    blocks = int4_blocks(rows)
    layer = make_linear([blocks], [None])
    assert isinstance(layer, PackedLinear) == (rows % 16 == 0)
    x = torch.randn(3, I, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = x.double() @ blocks.dequantize(torch.float64).T
    assert (layer(x).double() - expected).norm() / expected.norm() < 2**-7
