"""Linear layers against float64 products, and the promise that a row's bits are its own."""

from __future__ import annotations

import pytest
import torch

from hybrid.models.checkpoint import INT4_GROUP, Int4Blocks, Int8Blocks
from hybrid.models.linear import (
    DenseLinear,
    PackedLinear,
    ReorderedLinear,
    StackedLinear,
    make_linear,
)

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


@pytest.mark.parametrize("has_bias", [False, True])
def test_shared_weights_stay_where_they_are(has_bias):
    draw = torch.Generator().manual_seed(3)
    weights = [torch.randn(rows, I, generator=draw) for rows in (O, 32, 32)]
    biases = [torch.randn(len(w), generator=draw) if has_bias else None for w in weights]
    layer, fused = make_linear(weights, biases, share=True), make_linear(weights, biases)
    assert isinstance(layer, StackedLinear)
    assert [p.weight.data_ptr() for p in layer.parts] == [w.data_ptr() for w in weights]
    for rows in (1, 3, 20):
        x = torch.randn(rows, I, generator=draw)
        torch.testing.assert_close(layer(x), fused(x))
    assert torch.equal(layer.dense(), fused.dense())
    assert layer.nbytes == fused.nbytes
    assert (layer.bias is None) == (fused.bias is None)
    assert not has_bias or torch.equal(layer.bias, fused.bias)
    # Nothing to stack, or blocks: as without sharing.
    assert isinstance(make_linear(weights[:1], biases[:1], share=True), DenseLinear)
    assert isinstance(make_linear([int4_blocks()], [None], share=True), PackedLinear)


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


def test_quantize_is_nearer_than_sixteen_even_steps():
    weight = torch.randn(O, I, generator=torch.Generator().manual_seed(4))
    weight[0, :INT4_GROUP] = 0.25  # a block without a range
    grouped = weight.view(O, -1, INT4_GROUP)
    low, step = grouped.amin(-1, True), (grouped.amax(-1, True) - grouped.amin(-1, True)) / 15
    even = ((grouped - low) / step.clamp(min=1e-9)).round() * step + low
    ours = Int4Blocks.quantize(weight).dequantize(torch.float32).view_as(grouped)
    errors = [(found - grouped).square().sum(dim=-1) for found in (ours, even)]
    assert errors[0].sum() < 0.95 * errors[1].sum()
    assert (errors[0] <= errors[1] * 1.01 + 1e-3).all()
    # Half a step of a uniform error: variance step^2 / 12.
    expected = float((step**2 / 12 * INT4_GROUP).sum())
    assert float(errors[1].sum()) == pytest.approx(expected, rel=0.2)


def test_quantize_keeps_what_is_already_in_blocks():
    blocks = int4_blocks()
    blocks.quants[:, ::16] = 0xF0  # every block has its lowest and its highest level
    weight = blocks.dequantize(torch.float32)
    again = Int4Blocks.quantize(weight).dequantize(torch.float32)
    torch.testing.assert_close(again, weight, rtol=0, atol=3e-4)


@pytest.mark.parametrize("bias", [None, torch.randn(O).bfloat16()], ids=["plain", "bias"])
@pytest.mark.parametrize("blocks", [int4_blocks(), int8_blocks()], ids=["int4", "int8"])
def test_a_packed_layer_tells_its_weight(blocks, bias):
    dense, expected = PackedLinear([blocks], bias).dense(), blocks.dequantize(torch.float32)
    assert dense.shape == (O, I)
    floor = 0 if bias is None else 2**-7  # the bias was added in bfloat16 and taken off again
    torch.testing.assert_close(dense.float(), expected, rtol=2**-6, atol=2**-6 * 0.3 + floor)


REORDERS = pytest.mark.skipif(
    not ReorderedLinear.runs(torch.device("cpu"), torch.float32),
    reason="this build of torch has no oneDNN kernels",
)
DTYPES = [
    dtype
    for dtype in (torch.float32, torch.bfloat16)
    if ReorderedLinear.runs(torch.device("cpu"), dtype)
]


@REORDERS
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_reordered_layer_equals_the_product_in_float64(dtype, bias):
    draw = torch.Generator().manual_seed(5)
    for rows, columns in ((96, 128), (33, 7), (576, 1536)):
        weight = torch.randn(rows, columns, generator=draw).to(dtype)
        shift = torch.randn(rows, generator=draw).to(dtype) if bias else None
        layer = make_linear([weight], [shift], reorder=True)
        assert isinstance(layer, ReorderedLinear)
        assert torch.equal(layer.dense(), weight), "nothing is lost"
        assert layer.nbytes == weight.numel() * dtype.itemsize
        x = torch.randn(70, columns, generator=draw).to(dtype)
        expected = x.double() @ weight.double().T + (0 if shift is None else shift.double())
        error = (layer(x).double() - expected).norm() / expected.norm()
        assert error < {torch.float32: 2e-6, torch.bfloat16: 2**-7}[dtype]
        assert torch.equal(layer(x[::7]), layer(x[::7].contiguous()))


@REORDERS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_of_a_reordered_row_are_its_own(dtype):
    draw = torch.Generator().manual_seed(6)
    for rows, columns in ((960, 576), (576, 1536), (33, 7)):
        weight = torch.randn(rows, columns, generator=draw).to(dtype)
        layer = ReorderedLinear(weight, exact=True)
        x = torch.randn(64, columns, generator=draw).to(dtype)
        together = layer(x)
        for count in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33):
            assert torch.equal(layer(x[:count]), together[:count]), f"{count} rows"


def test_what_cannot_be_reordered_is_left_as_it_is():
    assert isinstance(make_linear([torch.randn(4, 8).half()], [None], reorder=True), DenseLinear)
    assert isinstance(make_linear([torch.randn(4, 8)], [None]), DenseLinear)
    assert not ReorderedLinear.runs(torch.device("meta"), torch.float32)
