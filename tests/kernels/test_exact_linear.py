"""linear against torch's own, arithmetic by hand, and the promise that a row's bits are its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tolerances import assert_as_close_as_torch

from hybrid.errors import ConfigError, KernelUnavailableError
from hybrid.kernels import dispatch
from hybrid.kernels.linear import linear
from hybrid.models.linear import DenseLinear

# Triton's interpreter computes wrongly in bfloat16.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
SHAPES = [  # tokens, in, out
    (1, 1, 1),
    (3, 63, 65),
    (17, 65, 127),
    (2, 1100, 130),  # two ranges of inputs, the second not full
    (65, 129, 63),
    (63, 127, 1),
    (127, 1, 65),
]
DIVIDED = (1100, 130)  # in, out


def tensors(num_tokens, num_in, num_out, dtype, device, *, has_bias=True):
    generator = torch.Generator().manual_seed(num_tokens + num_in)

    def draw(*size, scale=1.0):
        return (torch.randn(size, generator=generator) * scale).to(device, dtype)

    x, weight = draw(num_tokens, num_in), draw(num_out, num_in, scale=num_in**-0.5)
    return x, weight, draw(num_out) if has_bias else None


def by_triton(*args):
    with dispatch.force("linear", "triton"):
        out = linear(*args)
    assert dispatch.last("linear") == "triton"
    return out


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "N{}-I{}-O{}".format(*s))
def test_kernel_is_as_close_as_torch(shape, dtype, has_bias, device):
    args = tensors(*shape, dtype, device, has_bias=has_bias)
    out = by_triton(*args)
    assert out.dtype == dtype
    wide = F.linear(*(t if t is None else t.double() for t in args))
    assert_as_close_as_torch(out, F.linear(*args), wide)


# The interpreter takes a second for 400 programs.
@pytest.mark.parametrize("vocab_size", [49_152, pytest.param(151_936, marks=pytest.mark.gpu)])
def test_a_head(vocab_size, device):
    args = tensors(1, 8, vocab_size, torch.float16, device)
    wide = F.linear(*(t.double() for t in args))
    assert_as_close_as_torch(by_triton(*args), F.linear(*args), wide)


def test_reference_is_torchs():
    args = tensors(5, 26, 12, torch.float32, "cpu")
    out = linear(*args)
    assert dispatch.last("linear") == "reference"
    torch.testing.assert_close(out, F.linear(*args))


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_by_hand(implementation, device):
    x, weight = torch.tensor([[1.0, 2.0], [0.0, -1.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]])
    bias = torch.tensor([100.0, 200.0])
    with dispatch.force("linear", implementation):
        out = linear(x.to(device), weight.to(device), bias.to(device))
    assert out.tolist() == [[111.0, 217.0], [96.0, 194.0]]


@pytest.mark.parametrize("shape", [(70, 66), (1030, 20)], ids=["whole", "ranges"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rows_bits_are_its_own(dtype, shape, device, monkeypatch):
    """Alone, among others, in any place of a tile and in any tile.

    A tensor core computes a row by itself; the interpreter's matrix product, a CPU library's, need
    not. So here it is done row by row.
    """
    if not torch.cuda.is_available():
        monkeypatch.setattr("numpy.matmul", lambda a, b, dtype: np.stack([row @ b for row in a]))
    x, weight, bias = tensors(33, *shape, dtype, device)
    together = by_triton(x, weight, bias)
    for count in (1, 2, 5, 8, 17):
        assert torch.equal(by_triton(x[-count:], weight, bias), together[-count:]), count


def test_a_broken_row_harms_no_other(device):
    x, weight, bias = tensors(5, *DIVIDED, torch.float32, device)
    clean = by_triton(x, weight, bias)
    x[2] = float("nan")
    broken = by_triton(x, weight, bias)
    assert broken[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(broken[others], clean[others])


def test_ranges_follow_from_the_shape_of_the_weight():
    """Fewer than 128 tiles of outputs are divided into ranges of 512 inputs or more."""
    pytest.importorskip("triton")
    from hybrid.kernels.linear.triton import CONFIGS, range_of

    for num_out, num_in, expected in [
        (4096, 4096, 1024),  # 32 tiles, 4 ranges
        (6144, 4096, 1408),  # 48 tiles, 3 ranges of 22 blocks
        (28672, 4096, 4096),
        (576, 1536, 512),
        (960, 576, 576),
        (7, 0, 64),
    ]:
        assert range_of(num_out, num_in, CONFIGS[2]) == expected


def test_views(device):
    x, weight, bias = tensors(6, 20, 12, torch.float32, device)
    expected = by_triton(x[::2, 1:].clone(), weight[:, 1:].clone(), bias)
    assert torch.equal(by_triton(x[::2, 1:], weight[:, 1:], bias), expected)
    whole = by_triton(x, weight, bias)
    assert torch.equal(by_triton(x.flatten()[20:].view(5, 20), weight, bias), whole[1:])


@pytest.mark.parametrize("shape", [(0, 5, 6), (3, 5, 0), (3, 0, 6)], ids=str)
def test_nothing_in_or_out(shape, device):
    num_tokens, num_in, num_out = shape
    sizes = [(num_tokens, num_in), (num_out, num_in), (num_out,)]
    out = by_triton(*(torch.ones(size, device=device) for size in sizes))
    assert out.shape == (num_tokens, num_out)
    assert (out == 1).all(), "without inputs the bias alone"


def test_an_exact_layer_takes_the_kernel_and_another_does_not(device):
    x, weight, bias = tensors(3, 40, 24, torch.float32, device)
    with dispatch.force(None, "triton"):
        exact, plain = DenseLinear(weight, bias, exact=True)(x), DenseLinear(weight, bias)(x)
    assert torch.equal(exact, by_triton(x, weight, bias))
    torch.testing.assert_close(plain, exact)
    with dispatch.force("linear", "reference"):
        DenseLinear(weight, bias)(x)
        assert dispatch.last("linear") == "triton", "only an exact layer asks"
        DenseLinear(weight, bias, exact=True)(x)
        assert dispatch.last("linear") == "reference"


def test_refuses_what_does_not_fit(device):
    x, weight, bias = tensors(3, 5, 6, torch.float32, device)
    for args, message in [
        ((x[:, :4], weight, bias), "x is \\[3, 4\\].*expected \\[3, 5\\]"),
        ((x, weight, bias[:4]), "bias is \\[4\\]"),
        ((x[0], weight, bias), "expected \\[N, I\\] and \\[O, I\\]"),
        ((x.half(), weight, bias), "weight is torch.float32, expected torch.float16"),
        ((x.double(), weight, bias), "x is torch.float64"),
        ((x, weight.clone().requires_grad_(), bias), "requires a gradient"),
    ]:
        with pytest.raises(ConfigError, match=message):
            by_triton(*args)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU multiplies bfloat16")
def test_interpreter_refuses_bfloat16():
    with pytest.raises(KernelUnavailableError, match="interpreter"):
        by_triton(*tensors(2, 4, 4, torch.bfloat16, "cpu"))
