"""rms_norm against torch's own, transformers' module, and arithmetic by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tolerances import assert_as_close_as_torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hybrid.errors import ConfigError
from hybrid.kernels import dispatch
from hybrid.kernels.rms_norm import rms_norm

# Triton's interpreter computes wrongly in bfloat16.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
EPS = 1e-5


def tensors(shape, dtype, device, scale=1.0):
    generator = torch.Generator().manual_seed(sum(shape))
    x, residual = (torch.randn(shape, generator=generator) * scale for _ in range(2))
    weight = 1 + torch.randn(shape[-1], generator=generator) / 4
    return [t.to(device, dtype) for t in (x, residual, weight)]


def by_triton(*args):
    with dispatch.force("rms_norm", "triton"):
        out = rms_norm(*args)
    assert dispatch.last("rms_norm") == "triton"
    return out


def by_torch(x, weight):
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 63), (2, 65), (5, 127), (1, 576), (2, 3, 64), (1, 4096)], ids=str
)
def test_kernel_is_as_close_as_torch(shape, dtype, device):
    x, _, weight = tensors(shape, dtype, device)
    out, total = by_triton(x, weight, EPS)
    assert total is x
    assert_as_close_as_torch(out, by_torch(x, weight), by_torch(x.double(), weight.double()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 65), (2, 576)], ids=str)
def test_sum_has_torchs_bits_and_is_what_is_normalised(shape, dtype, device):
    x, residual, weight = tensors(shape, dtype, device)
    out, total = by_triton(x, weight, EPS, residual)
    assert torch.equal(total, x + residual)
    assert_as_close_as_torch(
        out, by_torch(total, weight), by_torch(total.double(), weight.double())
    )


def test_reference_is_transformers_module():
    x, residual, weight = tensors((4, 48), torch.float32, "cpu")
    module = LlamaRMSNorm(48, eps=EPS)
    module.weight.data = weight
    out, total = rms_norm(x, weight, EPS, residual)
    assert dispatch.last("rms_norm") == "reference"
    torch.testing.assert_close(out, module(x + residual))
    assert torch.equal(total, x + residual)


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_by_hand(implementation, device):
    """Mean square of (3, 4) is 12.5; with an eps of 3.5 the root is 4."""
    x = torch.tensor([[1.0, 1.0], [0.0, 0.0]], device=device)
    residual = torch.tensor([[2.0, 3.0], [0.0, 0.0]], device=device)
    with dispatch.force("rms_norm", implementation):
        out, total = rms_norm(x, torch.tensor([1.0, 2.0], device=device), 3.5, residual)
        plain, _ = rms_norm(total, None, 3.5)
    assert total.tolist() == [[3.0, 4.0], [0.0, 0.0]]
    torch.testing.assert_close(out.cpu(), torch.tensor([[0.75, 2.0], [0.0, 0.0]]))
    torch.testing.assert_close(plain.cpu(), torch.tensor([[0.75, 1.0], [0.0, 0.0]]))


def test_rows_that_are_not_adjacent(device):
    wide = torch.randn(4, 96, generator=torch.Generator().manual_seed(0)).to(device)
    x, residual = wide[::2, :48], wide[1::2, 48:]
    out, total = by_triton(x, None, EPS, residual)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(out, by_torch(x + residual, None))


def test_a_rows_bits_are_its_own(device):
    x, residual, weight = tensors((9, 80), torch.float32, device)
    together, _ = by_triton(x, weight, EPS, residual)
    for row in range(9):
        alone, _ = by_triton(x[row : row + 1], weight, EPS, residual[row : row + 1])
        assert torch.equal(alone[0], together[row])


def test_extreme_numbers(device):
    """Squares beyond float16 do not overflow: they are float32's."""
    x = torch.tensor([[30000.0, -30000.0], [6e-8, 0.0]], device=device).half()
    out, _ = by_triton(x, None, EPS)
    torch.testing.assert_close(out[0].float().cpu(), torch.tensor([1.0, -1.0]))
    assert out.isfinite().all()


def test_nothing_in_nothing_out(device):
    out, total = by_triton(torch.zeros(0, 8, device=device), None, EPS)
    assert out.shape == total.shape == (0, 8)


@pytest.mark.parametrize(
    ("x", "weight", "residual", "message"),
    [
        (torch.zeros(2, 4), torch.zeros(3), None, "expected \\[4\\]"),
        (torch.zeros(2, 4), None, torch.zeros(1, 4), "expected \\[2, 4\\]"),
        (torch.zeros(2, 4), None, torch.zeros(2, 4).half(), "float16, expected torch.float32"),
        (torch.zeros(1, 20000), None, None, "C is 20000"),
        (torch.zeros(2, 4).double(), None, None, "float64, expected"),
        (torch.zeros(2, 4, requires_grad=True), None, None, "requires a gradient"),
    ],
)
def test_refuses(x, weight, residual, message, device):
    x, weight, residual = (t if t is None else t.to(device) for t in (x, weight, residual))
    with pytest.raises(ConfigError, match=message):
        by_triton(x, weight, EPS, residual)
