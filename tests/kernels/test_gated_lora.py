"""gated_lora against one token at a time, the adapter layer it serves, and arithmetic by hand."""

from __future__ import annotations

import pytest
import torch
from tolerances import assert_as_close_as_torch

from hybrid.errors import ConfigError, KernelUnavailableError
from hybrid.kernels import dispatch
from hybrid.kernels.gated_lora import gated_lora
from hybrid.models.adapter import AnchorGated, LoraLinear
from hybrid.models.linear import DenseLinear

# Triton's interpreter computes wrongly in bfloat16.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
SHAPES = [  # tokens, in, out, rank, adapters
    (1, 1, 1, 1, 1),
    (3, 63, 65, 5, 2),
    (17, 65, 127, 16, 3),
    (33, 127, 63, 17, 1),
    (2, 40, 96, 70, 2),  # a rank in two parts
    (63, 24, 1, 3, 3),
    (65, 1, 40, 4, 2),
    (127, 30, 20, 1, 1),
]


def tensors(shape, dtype, device):
    num_tokens, num_in, num_out, rank, num_adapters = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def draw(*size, scale=1.0):
        return (torch.randn(size, generator=generator) * scale).to(device, dtype)

    base, x = draw(num_tokens, num_out), draw(num_tokens, num_in)
    a = draw(num_adapters, rank, num_in, scale=num_in**-0.5)
    b = draw(num_adapters, num_out, rank, scale=rank**-0.5)
    ids = torch.randint(-1, num_adapters, (num_tokens,), generator=generator).to(device)
    ids[-1] = num_adapters - 1
    return base, x, a, b, ids


def by_triton(*args):
    with dispatch.force("gated_lora", "triton"):
        out = gated_lora(*args)
    assert dispatch.last("gated_lora") == "triton"
    return out


def one_by_one(base, x, a, b, ids):
    """Every token by itself, every product in the dtype of its factors."""
    rows = []
    for token, index in enumerate(ids.tolist()):
        update = b[index] @ (a[index] @ x[token])
        rows.append(base[token] + update if index >= 0 else base[token])
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "N{}-I{}-O{}-R{}-E{}".format(*s))
def test_kernel_is_as_close_as_torch(shape, dtype, device):
    args = tensors(shape, dtype, device)
    wide = [t.double() for t in args[:4]] + [args[4]]
    assert_as_close_as_torch(by_triton(*args), one_by_one(*args), one_by_one(*wide))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "N{}-I{}-O{}-R{}-E{}".format(*s))
def test_reference_is_one_token_at_a_time(shape):
    args = tensors(shape, torch.float32, "cpu")
    out = gated_lora(*args)
    assert dispatch.last("gated_lora") == "reference"
    torch.testing.assert_close(out, one_by_one(*args))


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_serves_an_adapter_of_a_fused_layer(implementation, device):
    """As the backbone holds it: several ranks side by side, the second half block-diagonal."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(12, 8, generator=generator).to(device)
    a = torch.randn(4, 8, generator=generator).to(device)
    b = torch.block_diag(torch.randn(6, 2), torch.randn(6, 2)).to(device)
    x = torch.randn(5, 8, generator=generator).to(device)
    layer = DenseLinear(weight)
    ids = torch.tensor([-1, 0, 0, 0, 0], device=device)  # the anchor runs the base layer
    with dispatch.force("gated_lora", implementation):
        out = gated_lora(layer(x), x, a[None], b[None], ids)
    assert torch.equal(out[0], layer(x)[0])
    torch.testing.assert_close(out[1:], LoraLinear(layer, a, b)(x)[1:])


def test_an_adapter_layer_adds_its_update_in_one_launch(device):
    """Two passes of 3 rows: plain, and with the base layer for each one's anchor."""
    generator = torch.Generator().manual_seed(4)
    weight, a, b, x = (
        torch.randn(size, generator=generator).to(device)
        for size in ((70, 40), (5, 40), (70, 5), (6, 40))
    )
    layer = LoraLinear(DenseLinear(weight), a, b)
    outs = {}
    for implementation in ("reference", "triton"):
        with dispatch.force("gated_lora", implementation):
            outs[implementation] = layer(x), AnchorGated(layer.base, layer, 3)(x)
        assert dispatch.last("gated_lora") == implementation
    for ours, twin in zip(outs["triton"], outs["reference"], strict=True):
        torch.testing.assert_close(ours, twin)
    plain, gated = outs["triton"]
    assert torch.equal(gated[::3], layer.base(x)[::3]), "anchors have the base layer's bits"
    others = [1, 2, 4, 5]
    assert torch.equal(gated[others], plain[others])
    assert not torch.isclose(gated[::3], plain[::3]).all()


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_by_hand(implementation, device):
    """x A^T is 1*3 + 2*4 = 11, times B = (1, -2), for adapter 0; B of adapter 1 is ten times it."""
    base, x = torch.tensor([[100.0, 200.0]] * 3), torch.tensor([[1.0, 2.0]] * 3)
    a, b = torch.tensor([[[3.0, 4.0]]] * 2), torch.tensor([[[1.0], [-2.0]], [[10.0], [-20.0]]])
    ids = torch.tensor([1, -1, 0])
    with dispatch.force("gated_lora", implementation):
        out = gated_lora(*(t.to(device) for t in (base, x, a, b, ids)))
    assert out.tolist() == [[210.0, -20.0], [100.0, 200.0], [111.0, 178.0]]


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_a_broken_adapter_harms_no_other_token(implementation, device):
    base, x, a, b, ids = tensors((20, 33, 34, 4, 3), torch.float32, device)
    ids = torch.arange(20, device=device) % 4 - 1
    with dispatch.force("gated_lora", implementation):
        clean = gated_lora(base, x, a, b, ids)
        a[1], b[1], x[ids == 1] = float("inf"), float("nan"), float("nan")
        broken = gated_lora(base, x, a, b, ids)
    assert torch.equal(broken[ids != 1], clean[ids != 1])
    assert torch.equal(broken[ids == -1], base[ids == -1])
    assert broken[ids == 1].isnan().all()


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_nobody_has_an_adapter(implementation, device):
    base, x, a, b, ids = tensors((4, 5, 6, 2, 1), torch.float32, device)
    with dispatch.force("gated_lora", implementation):
        out = gated_lora(base, x, a, b, torch.full_like(ids, -1))
    assert torch.equal(out, base)
    assert out.data_ptr() != base.data_ptr()


def test_views(device):
    base, x, a, b, ids = tensors((6, 10, 12, 4, 2), torch.float32, device)
    expected = by_triton(base[::2].clone(), x[::2, 1:].clone(), a[..., 1:].clone(), b, ids[::2])
    assert torch.equal(by_triton(base[::2], x[::2, 1:], a[..., 1:], b, ids[::2]), expected)


def test_refuses_what_does_not_fit(device):
    base, x, a, b, ids = tensors((3, 5, 6, 2, 2), torch.float32, device)
    for args, message in [
        ((base, x[:, :4], a, b, ids), "x is \\[3, 4\\].*expected \\[3, 5\\]"),
        ((base, x, a, b[:1], ids), "b is \\[1, 6, 2\\]"),
        ((base, x, a, b, ids[:2]), "ids is \\[2\\]"),
        ((base, x.half(), a, b, ids), "x is torch.float16"),
        ((base, x, a.clone().requires_grad_(), b, ids), "requires a gradient"),
    ]:
        with pytest.raises(ConfigError, match=message):
            by_triton(*args)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU multiplies bfloat16")
def test_interpreter_refuses_bfloat16():
    args = tensors((2, 4, 4, 2, 1), torch.bfloat16, "cpu")
    with pytest.raises(KernelUnavailableError, match="interpreter"):
        by_triton(*args)
