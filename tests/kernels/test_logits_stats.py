"""logits_stats: the reference against torch's own functions, the kernel against the reference."""

from __future__ import annotations

import math

import pytest
import torch
from tolerances import assert_as_close_as_torch

from hybrid.errors import ConfigError
from hybrid.kernels import dispatch
from hybrid.kernels.logits_stats import logits_stats

INF = math.inf
SHAPES = [(1, 1), (3, 2), (2, 63), (65, 65), (2, 127), (3, 4095), (2, 4097), (2, 49_152)]
DTYPES = [torch.float32, torch.float16]  # the interpreter computes bfloat16 wrongly


def logits_of(shape, dtype=torch.float32, scale=4.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def run(implementation, logits, device, **options):
    with dispatch.force("logits_stats", implementation):
        out = logits_stats(logits.to(device), **options)
    assert dispatch.last("logits_stats") == implementation
    return out._make(t.cpu() for t in out)


def assert_equals_the_reference(logits, device, **options):
    kernel = run("triton", logits, device, **options)
    same = run("reference", logits, torch.device("cpu"), **options)
    exact = run("reference", logits.double(), torch.device("cpu"), **options)
    assert kernel.argmax.dtype == torch.int64
    assert torch.equal(kernel.argmax, exact.argmax)
    for got, torch_same, want in zip(kernel[1:], same[1:], exact[1:], strict=True):
        assert got.dtype == torch.float32
        assert_as_close_as_torch(got, torch_same, want)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_by_hand(implementation, device):
    """Weights 6, 3, 1; at temperature 1/2 they are 36, 9, 1."""
    logits = torch.tensor([[3.0, 6.0, 9.0, 1.0]]).log().repeat(2, 1)
    out = run(
        implementation,
        logits,
        device,
        temperature=torch.tensor([1.0, 0.5], device=device),
        suppressed=2,
    )
    assert out.argmax.tolist() == [1, 1]
    assert out.probability.tolist() == pytest.approx([0.6, 36 / 46])
    assert out.margin.tolist() == pytest.approx([0.3, 27 / 46])
    assert out.logsumexp.tolist() == pytest.approx([math.log(10), math.log(46)])
    entropies = [
        -sum(p * math.log(p) for p in law) for law in ((0.6, 0.3, 0.1), (36 / 46, 9 / 46, 1 / 46))
    ]
    assert out.entropy.tolist() == pytest.approx(entropies)


def test_the_reference_is_what_torch_says():
    logits = logits_of((5, 300)).double()
    out = logits_stats(logits, temperature=0.7, suppressed=7)
    logits[:, 7] = -INF
    law = (logits / 0.7).softmax(dim=1)
    best = law.topk(2).values
    assert torch.equal(out.argmax, logits.argmax(dim=1))
    torch.testing.assert_close(out.probability, best[:, 0], rtol=1e-6, atol=0)
    torch.testing.assert_close(out.margin, best[:, 0] - best[:, 1], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(
        out.entropy, torch.distributions.Categorical(probs=law).entropy(), rtol=1e-6, atol=1e-9
    )
    torch.testing.assert_close(out.logsumexp, (logits / 0.7).logsumexp(dim=1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_equals_the_reference(shape, dtype, device):
    logits = logits_of(shape, dtype)
    suppressed = int(logits[0].argmax()) if shape[1] > 1 else None
    assert_equals_the_reference(logits, device, temperature=0.7, suppressed=suppressed)


@pytest.mark.slow
def test_a_large_vocabulary(device):
    assert_equals_the_reference(logits_of((2, 151_936)), device, suppressed=151_643)


@pytest.mark.gpu  # the interpreter gets bfloat16 wrong
def test_bfloat16(device):
    assert_equals_the_reference(logits_of((64, 151_936), torch.bfloat16), device, temperature=0.6)


def test_ties_go_to_the_lowest_id_across_tiles(device):
    logits = torch.zeros(1, 3 * 4096)
    logits[0, [4095, 4096, 9000]] = 2.0
    out = run("triton", logits, device)
    assert (out.argmax.item(), out.margin.item()) == (4095, 0.0)


def test_a_law_that_is_almost_certain_keeps_its_entropy(device):
    distances = [6.0, 10.0, 14.0, 17.0, 25.0, 40.0, 80.0]
    logits = torch.tensor([[0.0, -d] for d in distances])
    out = run("triton", logits, device)
    wanted = [math.log1p(math.exp(-d)) + d / (1 + math.exp(d)) for d in distances]
    assert out.entropy.tolist() == pytest.approx(wanted, rel=1e-5, abs=0)


def test_impossible_and_extreme_tokens(device):
    logits = torch.tensor(
        [[-INF, 3.0, -INF], [3e38, -3e38, 0.0], [0.0, 1e-30, 0.0], [-1e30, -1e30, -INF]]
    )
    kernel, exact = run("triton", logits, device), run("reference", logits.double(), "cpu")
    assert kernel.argmax.tolist() == [1, 0, 1, 0]
    for got, want in zip(kernel[1:], exact[1:], strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


def test_low_and_high_temperatures(device):
    logits = logits_of((2, 100))
    cold = run("triton", logits, device, temperature=1e-30)
    assert cold.probability.tolist() == [1.0, 1.0]
    assert cold.entropy.tolist() == [0.0, 0.0]
    hot = run("triton", logits, device, temperature=1e30)
    assert hot.entropy.tolist() == pytest.approx([math.log(100)] * 2)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_a_row_without_a_token_says_so_and_spoils_no_other(implementation, device):
    logits = torch.tensor([[-INF, -INF, -INF], [0.0, -INF, -INF], [math.nan, 0.0, 0.0]])
    out = run(implementation, logits, device)
    assert out.argmax[:2].tolist() == [0, 0]
    assert out.logsumexp[:2].tolist() == [-INF, 0.0]
    assert out.probability[:2].nan_to_num(-1).tolist() == [-1, 1.0]
    assert 0 <= out.argmax[2] < 3
    assert all(t[2].isnan() for t in out[1:])


def test_strided_rows_and_no_rows(device):
    logits = logits_of((4, 3, 130))
    for view in (logits[:, 1], logits[:, 0].T.contiguous().T):
        kernel, want = run("triton", view, device), run("reference", view, "cpu")
        torch.testing.assert_close(kernel.entropy, want.entropy)
    assert run("triton", logits[:0, 0], device).entropy.shape == (0,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(3)}, "expected \\[N, V\\]"),
        ({"logits": torch.zeros(3, 2, dtype=torch.long)}, "floats"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": torch.ones(4)}, "expected \\[3\\]"),
        ({"suppressed": 5}, "id below 5"),
    ],
    ids=lambda value: "",
)
def test_bad_arguments(change, message):
    arguments = {"logits": torch.zeros(3, 5), **change}
    with pytest.raises(ConfigError, match=message):
        logits_stats(arguments.pop("logits"), **arguments)
