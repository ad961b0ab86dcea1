"""swiglu against torch's SiLU and arithmetic by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from tolerances import assert_as_close_as_torch

from hybrid.errors import ConfigError
from hybrid.kernels import dispatch
from hybrid.kernels.swiglu import swiglu

# Triton's interpreter computes wrongly in bfloat16.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()


def by_triton(gate_up):
    with dispatch.force("swiglu", "triton"):
        out = swiglu(gate_up)
    assert dispatch.last("swiglu") == "triton"
    return out


def by_torch(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (1, 65), (7, 127), (2, 1536), (1, 2500)])
def test_kernel_is_as_close_as_torch(shape, dtype, device):
    generator = torch.Generator().manual_seed(shape[1])
    gate_up = (3 * torch.randn(shape[0], 2 * shape[1], generator=generator)).to(device, dtype)
    out = by_triton(gate_up)
    assert out.dtype == dtype
    assert_as_close_as_torch(out, by_torch(gate_up), by_torch(gate_up.double()))


def test_reference_is_torchs():
    gate_up = torch.randn(5, 26, generator=torch.Generator().manual_seed(0))
    out = swiglu(gate_up)
    assert dispatch.last("swiglu") == "reference"
    torch.testing.assert_close(out, by_torch(gate_up))


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_by_hand(implementation, device):
    """sigmoid(ln 3) is 3/4; far below zero the gate is shut, far above it is open."""
    gate_up = torch.tensor([[math.log(3), -200.0, 200.0, 8.0, 5.0, 0.5]], device=device)
    with dispatch.force("swiglu", implementation):
        out = swiglu(gate_up)
    expected = torch.tensor([[math.log(3) * 0.75 * 8, 0.0, 100.0]])
    torch.testing.assert_close(out.cpu(), expected)


def test_columns_of_a_wider_tensor(device):
    wide = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)).to(device)
    torch.testing.assert_close(by_triton(wide[:, 3:33]), by_torch(wide[:, 3:33]))


def test_nothing_in_nothing_out(device):
    assert by_triton(torch.zeros(0, 8, device=device)).shape == (0, 4)


@pytest.mark.parametrize(
    ("gate_up", "message"),
    [
        (torch.zeros(2, 5), "expected \\[N, 2 I\\]"),
        (torch.zeros(2, 2, 4), "expected \\[N, 2 I\\]"),
        (torch.zeros(2, 4).double(), "float64, expected"),
        (torch.zeros(2, 4, requires_grad=True), "requires a gradient"),
    ],
)
def test_refuses(gate_up, message, device):
    with pytest.raises(ConfigError, match=message):
        by_triton(gate_up.to(device))
