"""sample: reference and kernel against hybrid/sampling.py, token by token at the same quantiles."""

from __future__ import annotations

import math

import pytest
import torch

from hybrid.errors import ConfigError
from hybrid.kernels import dispatch
from hybrid.kernels.sample import sample, truncate
from hybrid.params import SamplingParams
from hybrid.sampling import argmax, inverse_cdf, probs, process_logits

INF, LAST = math.inf, 1 - 2**-53
BOTH = pytest.mark.parametrize("implementation", ["reference", "triton"])
CASES = {
    "plain": {"temperature": 1.0},
    "greedy": {"temperature": 0.0},
    "cold": {"temperature": 1e-6},
    "hot": {"temperature": 50.0},
    "top_k": {"temperature": 0.8, "top_k": 7},
    "top_k_1": {"temperature": 0.8, "top_k": 1},
    "top_k_all": {"temperature": 0.8, "top_k": 10**6},
    "top_p": {"temperature": 1.2, "top_p": 0.8},
    "top_p_tiny": {"temperature": 1.2, "top_p": 1e-9},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "min_p_1": {"temperature": 1.0, "min_p": 1.0},
    "all_three": {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
}


def logits_of(shape, dtype=torch.float32, seed=0, step=None):
    """Normal logits; those that are multiples of `step` have many ties."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(shape, generator=generator) * 3
    return (logits if step is None else (logits / step).round() * step).to(dtype)


def quantiles(num_rows, seed=1):
    return torch.rand(num_rows, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run(implementation, logits, uniforms, device, **options):
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    with dispatch.force("sample", implementation):
        out = sample(logits.to(device), uniforms.to(device), **options)
    assert dispatch.last("sample") == implementation
    return out.tolist()


def drawn_by_hybrid_sampling(logits, uniforms, **options):
    if options["temperature"] == 0:
        return argmax(logits).tolist()
    laws = probs(process_logits(logits, SamplingParams(**options), (), 0))
    return [inverse_cdf(law, u) for law, u in zip(laws, uniforms.tolist(), strict=True)]


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 2, 63, 65, 127, 4097])
@pytest.mark.parametrize("case", CASES)
def test_draws_what_hybrid_sampling_draws(case, vocab_size, dtype, implementation, device):
    """Coarse logits besides fine ones: truncation cuts through ties, and the lower id stays."""
    num_rows = 2 if vocab_size > 127 else 4
    for step in (None, 0.5):
        logits = logits_of((num_rows, vocab_size), dtype, step=step)
        uniforms = quantiles(num_rows)
        wanted = drawn_by_hybrid_sampling(logits, uniforms, **CASES[case])
        assert run(implementation, logits, uniforms, device, **CASES[case]) == wanted


@BOTH
@pytest.mark.parametrize("case", ["top_k", "top_p", "min_p", "all_three"])
def test_the_law_is_hybrid_samplings(case, implementation, device):
    """A grid of quantiles finds every token that is kept, and none that is not."""
    logits = logits_of((1, 40), step=0.5)
    grid = (torch.arange(24, dtype=torch.float64) + 0.5) / 24
    wanted = drawn_by_hybrid_sampling(logits.expand(24, -1), grid, **CASES[case])
    assert len(set(wanted)) > 1
    assert run(implementation, logits.expand(24, -1), grid, device, **CASES[case]) == wanted


def truncated(implementation, logits, device, **options):
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    with dispatch.force("sample", implementation):
        out = truncate(logits.to(device), **options)
    assert dispatch.last("sample") == implementation
    assert out.dtype == torch.float32
    return out.cpu()


@BOTH
@pytest.mark.parametrize("vocab_size", [1, 2, 63, 127, 4097])
@pytest.mark.parametrize("case", [case for case in CASES if case != "greedy"])
def test_truncated_logits_are_hybrid_samplings(case, vocab_size, implementation, device):
    """But for tokens whose probability is 0 in float32, which are dropped."""
    for step in (None, 0.5):
        logits = logits_of((2, vocab_size), step=step)
        wanted = process_logits(logits, SamplingParams(**CASES[case]), (), 0)
        wanted = wanted.masked_fill(wanted.exp() == 0, -INF)
        ours = truncated(implementation, logits, device, **CASES[case])
        ours = ours.masked_fill(ours.exp() == 0, -INF)
        assert torch.equal(ours, wanted)


@BOTH
def test_truncation_cuts_through_ties_across_tiles(implementation, device):
    logits = torch.zeros(2, 5001)
    logits[0, 4999] = 1.0
    ours = truncated(implementation, logits, device, top_k=4501)
    expected = torch.full((2, 5001), -INF)
    expected[0, :4500], expected[0, 4999], expected[1, :4501] = -1.0, 0.0, 0.0
    assert torch.equal(ours, expected)


@BOTH
def test_truncation_row_by_row(implementation, device):
    """Each row has its own parameters; one that is no law is NaN, and spoils no other."""
    logits = logits_of((5, 63))
    logits[3, 5], logits[4] = math.nan, -INF
    rows = [CASES[name] for name in ("top_k", "top_p", "greedy", "min_p", "min_p")]
    defaults = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    options = {
        name: torch.tensor([{**defaults, **row}[name] for row in rows])
        for name in ("temperature", *defaults)
    }
    ours = truncated(implementation, logits, device, **options)
    for b in (0, 1):
        wanted = process_logits(logits[b : b + 1], SamplingParams(**rows[b]), (), 0)[0]
        assert torch.equal(ours[b], wanted)
    best = int(logits[2].argmax())
    assert ours[2, best] == 0
    assert ours[2].isfinite().sum() == 1
    assert ours[3:].isnan().all()
    assert truncated(implementation, logits[:0], device).shape == (0, 63)


@BOTH
def test_by_hand(implementation, device):
    """Weights 4, 1, 3, 2 of ids 0 to 3."""
    logits = torch.tensor([[4.0, 1.0, 3.0, 2.0]]).log()

    def at(u, **options):
        return run(
            implementation, logits, torch.tensor([u], dtype=torch.float64), device, **options
        )[0]

    assert [at(u) for u in (0.0, 0.39, 0.41, 0.51, 0.79, 0.81, LAST)] == [0, 0, 1, 2, 2, 3, 3]
    assert [at(u, top_k=2) for u in (0.57, 0.58)] == [0, 2]
    assert [at(u, top_p=0.69) for u in (0.57, 0.58)] == [0, 2]
    assert [at(u, top_p=0.71) for u in (0.44, 0.45, 0.78)] == [0, 2, 3]
    assert [at(u, min_p=0.6) for u in (0.57, 0.58)] == [0, 2]
    # Of the two tokens that top_k leaves, 4/7 reaches a half.
    assert at(LAST, top_k=2, top_p=0.5) == 0


@BOTH
def test_among_equals_the_lower_ids_stay(implementation, device):
    """Across tiles, too: 5000 equal tokens behind one that is better."""
    logits = torch.zeros(2, 5001)
    logits[:, 4999] = 1.0
    uniforms = torch.tensor([LAST, 0.0], dtype=torch.float64)
    assert run(implementation, logits, uniforms, device, top_k=4501) == [4999, 0]
    logits[:, 4999] = 0.0
    assert run(implementation, logits, uniforms, device, top_k=4500) == [4499, 0]
    assert run(implementation, logits, uniforms, device, top_p=0.5) == [2500, 0]


@BOTH
def test_quantiles_across_tiles(implementation, device):
    """10,000 equal tokens: quantile u is token 10,000 u."""
    quantiles = [0.0, 0.30005, 0.40965, 0.70005, 0.81925, 0.99995, LAST]
    uniforms = torch.tensor(quantiles, dtype=torch.float64)
    wanted = [0, 3000, 4096, 7000, 8192, 9999, 9999]
    assert run(implementation, torch.zeros(7, 10_000), uniforms, device) == wanted
    wanted = [0, 1500, 2048, 3500, 4096, 4999, 4999]
    assert run(implementation, torch.zeros(7, 10_000), uniforms, device, top_k=5000) == wanted


@BOTH
@pytest.mark.parametrize(
    ("logits", "temperature"),
    [
        ([1e6, 0.22, 0.23], 1e6),  # both are 999999.75 from the best
        ([0.0, -1.5 - 2**-22, -1.5 - 2**-23], 0.75),  # both are 2 + 2**-22 from it
    ],
    ids=["difference", "quotient"],
)
def test_ties_are_those_of_the_tempered_logits(logits, temperature, implementation, device):
    """Rounding makes the two lesser ones equal, so that the lower id stays, not the better one."""
    logits, uniforms = torch.tensor([logits]), torch.tensor([LAST], dtype=torch.float64)
    assert logits[0, 1] < logits[0, 2]
    options = {"temperature": temperature, "top_k": 2}
    assert drawn_by_hybrid_sampling(logits, uniforms, **options) == [1]
    assert run(implementation, logits, uniforms, device, **options) == [1]


@BOTH
def test_each_row_has_its_own_parameters(implementation, device):
    logits, uniforms = logits_of((5, 63)), quantiles(5)
    rows = [CASES[name] for name in ("plain", "greedy", "top_k", "top_p", "min_p")]
    defaults = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    options = {
        name: torch.tensor([{**defaults, **row}[name] for row in rows])
        for name in ("temperature", *defaults)
    }
    wanted = [
        drawn_by_hybrid_sampling(logits[i : i + 1], uniforms[i : i + 1], **row)[0]
        for i, row in enumerate(rows)
    ]
    assert run(implementation, logits, uniforms, device, **options) == wanted


@BOTH
def test_rows_without_a_law(implementation, device):
    logits = torch.tensor(
        [[math.nan, 0.0], [-INF, -INF], [INF, 0.0], [-INF, 0.0], [0.0, -INF], [-1e38, 1e38]]
    )
    for u in (0.0, LAST):
        uniforms = torch.full((6,), u, dtype=torch.float64)
        for options in ({}, {"top_k": 1}, {"top_p": 0.5}, {"temperature": 0.0}):
            drawn = run(implementation, logits, uniforms, device, **options)
            assert drawn == [-1, -1, -1, 1, 0, 1]


@BOTH
def test_the_last_quantile_is_a_token(implementation, device):
    """Where sums in two orders may differ in their last bit, too."""
    logits = logits_of((16, 65))
    logits[:, -1] = -INF
    uniforms = torch.full((16,), LAST, dtype=torch.float64)
    assert run(implementation, logits, uniforms, device) == [63] * 16


@BOTH
def test_strided_rows_and_no_rows(implementation, device):
    logits, uniforms = logits_of((3, 2, 65)), quantiles(3)
    for view in (logits[:, 1], logits[:, 0].T.contiguous().T):
        wanted = drawn_by_hybrid_sampling(view, uniforms, temperature=1.0)
        assert run(implementation, view, uniforms, device) == wanted
    assert run(implementation, logits[:0, 0], uniforms[:0], device) == []


@pytest.mark.parametrize("vocab_size", [49_152, pytest.param(151_936, marks=pytest.mark.slow)])
def test_large_vocabularies(vocab_size, device):
    logits, uniforms = logits_of((1, vocab_size), torch.float16), quantiles(1)
    options = {"temperature": 0.9, "top_k": 50, "top_p": 0.95}
    wanted = drawn_by_hybrid_sampling(logits, uniforms, **options)
    assert run("triton", logits, uniforms, device, **options) == wanted
    law = process_logits(logits, SamplingParams(**options), (), 0)
    assert torch.equal(truncated("triton", logits, device, **options), law)


@pytest.mark.gpu  # the interpreter gets bfloat16 wrong
@pytest.mark.parametrize("case", CASES)
def test_bfloat16(case, device):
    logits, uniforms = logits_of((64, 151_936), torch.bfloat16), quantiles(64)
    wanted = drawn_by_hybrid_sampling(logits, uniforms, **CASES[case])
    assert run("triton", logits, uniforms, device, **CASES[case]) == wanted


def test_bad_arguments():
    logits, uniforms = torch.zeros(3, 5), torch.zeros(3).double()
    with pytest.raises(ConfigError, match="expected \\[N, V\\]"):
        sample(logits[0], uniforms)
    with pytest.raises(ConfigError, match="uniforms is \\[2\\]"):
        sample(logits, uniforms[:2])
    with pytest.raises(ConfigError, match="top_k is \\[1\\]"):
        sample(logits, uniforms, top_k=torch.tensor([1]))
