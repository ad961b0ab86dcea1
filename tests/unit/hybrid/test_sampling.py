"""Transforms against transformers' processors and a float64 plain-Python twin; draws exactly."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hybrid import sampling
from hybrid.errors import ConfigError
from hybrid.params import SamplingParams
from hybrid.sampling import inverse_cdf, probs, process_logits, sample, token_logprobs, uniforms
from hybrid.streams import RandomStream

INF = math.inf


def random_logits(num_rows, vocab, seed=0, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab, generator=generator) * scale


def twin(logits, params, history, num_prompt, eos=()):
    """Process one row in float64 lists; return the distribution."""
    row = [float(x) for x in logits]
    generated = Counter(history[num_prompt:])
    for token in set(history):
        penalty = params.repetition_penalty
        row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    for token, count in generated.items():
        row[token] -= params.presence_penalty + count * params.frequency_penalty
    if len(history) - num_prompt < params.min_new_tokens:
        for token in (*params.stop_token_ids, *(() if params.ignore_eos else eos)):
            row[token] = -INF
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    if params.temperature == 0:
        return [float(i == order[0]) for i in range(len(row))]
    top = row[order[0]]
    weights = [math.exp((x - top) / params.temperature) for x in row]
    kept = order[: params.top_k] if params.top_k else order
    total, reached, nucleus = sum(weights[i] for i in kept), 0.0, []
    for i in kept:
        if reached < params.top_p or params.top_p == 1:  # rounding must not cut the tail
            nucleus.append(i)
        reached += weights[i] / total
    kept = [i for i in nucleus if weights[i] >= params.min_p * weights[order[0]]]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(row))]


CASES = {
    "plain": {"temperature": 1.0},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 2.5},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_k_1": {"temperature": 1.0, "top_k": 1},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "top_p_tiny": {"temperature": 1.0, "top_p": 1e-9},
    "min_p": {"temperature": 0.8, "min_p": 0.1},
    "min_p_1": {"temperature": 0.8, "min_p": 1.0},
    "all_three": {"temperature": 1.3, "top_k": 12, "top_p": 0.8, "min_p": 0.05},
    "repetition": {"temperature": 1.0, "repetition_penalty": 1.7},
    "presence": {"temperature": 1.0, "presence_penalty": 1.5},
    "frequency": {"temperature": 1.0, "frequency_penalty": -0.7},
    "everything": {
        "temperature": 0.9, "top_k": 15, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2,
        "presence_penalty": 0.4, "frequency_penalty": 0.3, "min_new_tokens": 6,
        "stop_token_ids": (3,),
    },
    "greedy_penalties": {"repetition_penalty": 2.0, "frequency_penalty": 0.5},
    "greedy_min_new": {"min_new_tokens": 9, "stop_token_ids": (3, 4)},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_float64_twin(case):
    params = SamplingParams(**CASES[case])
    vocab, history, num_prompt, drafted = 31, [1, 2, 2, 5, 7, 7, 9], 4, [7, 11, 2]
    logits = random_logits(4, vocab)
    out = process_logits(logits, params, history, num_prompt, drafted, eos_token_ids=(0, 6))
    for i in range(4):
        wanted = twin(logits[i], params, history + drafted[:i], num_prompt, eos=(0, 6))
        if params.is_greedy:
            assert out[i].argmax() == wanted.index(1.0)
        else:
            torch.testing.assert_close(probs(out)[i], torch.tensor(wanted), atol=1e-6, rtol=1e-5)
            assert [p > 0 for p in probs(out)[i].tolist()] == [p > 0 for p in wanted]


@pytest.mark.parametrize(
    ("params", "make"),
    [
        ({"temperature": 0.7}, lambda: [TemperatureLogitsWarper(0.7)]),
        ({"temperature": 1.0, "top_k": 7}, lambda: [TopKLogitsWarper(7)]),
        ({"temperature": 1.0, "top_p": 0.83}, lambda: [TopPLogitsWarper(0.83)]),
        ({"temperature": 1.0, "min_p": 0.07}, lambda: [MinPLogitsWarper(0.07)]),
        (
            {"temperature": 1.0, "repetition_penalty": 1.4},
            lambda: [RepetitionPenaltyLogitsProcessor(1.4)],
        ),
        (
            {"temperature": 0.6, "top_k": 40, "top_p": 0.9, "min_p": 0.02,
             "repetition_penalty": 1.3},
            lambda: [
                RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(0.6),
                TopKLogitsWarper(40), TopPLogitsWarper(0.9), MinPLogitsWarper(0.02),
            ],
        ),
    ],
    ids=["temperature", "top_k", "top_p", "min_p", "repetition", "chain"],
)  # fmt: skip
def test_agrees_with_transformers(params, make):
    history = [3, 8, 8, 2]
    logits = random_logits(6, 300, seed=3)
    wanted = logits.clone()
    for processor in make():
        wanted = processor(torch.tensor([history] * 6), wanted)
    for i in range(6):
        out = process_logits(logits[i : i + 1], SamplingParams(**params), history, 2)
        torch.testing.assert_close(probs(out)[0], wanted[i].softmax(0), atol=1e-6, rtol=1e-5)
        assert torch.equal(out[0].isinf(), wanted[i].isinf())


@pytest.mark.parametrize("top_p", [0.5, 0.9999])
def test_nucleus_wider_than_the_first_guess(top_p, monkeypatch):
    params = SamplingParams(temperature=1.0, top_p=top_p)
    logits = random_logits(2, 500, scale=0.5)
    whole = process_logits(logits, params, [], 0)
    monkeypatch.setattr(sampling, "_NUCLEUS_GUESS", 8)
    assert torch.equal(process_logits(logits, params, [], 0), whole)
    assert (~whole.isinf()).sum(1).min() > 8


def test_greedy_without_transforms_returns_the_logits_themselves():
    logits = random_logits(2, 5).bfloat16()
    params = SamplingParams(top_k=2, top_p=0.1, min_new_tokens=1)
    assert process_logits(logits, params, [1, 2], 1) is logits


@pytest.mark.parametrize("case", CASES)
def test_inputs_stay_unchanged(case):
    logits = random_logits(2, 8)
    before, history, drafted = logits.clone(), [1, 2], [3]
    process_logits(logits, SamplingParams(**CASES[case]), history, 1, drafted, (0,))
    assert torch.equal(logits, before)
    assert (history, drafted) == ([1, 2], [3])


def test_min_new_tokens_bars_eos_row_by_row():
    params = SamplingParams(min_new_tokens=3, stop_token_ids=(2, 99))
    logits = torch.zeros(4, 5)
    out = process_logits(logits, params, [1, 1, 1], 2, [1, 1, 1], eos_token_ids=(0,))
    barred = [[False] * 5 for _ in range(4)]
    for i in range(2):  # rows 0 and 1 are for the second and third new token
        barred[i][0] = barred[i][2] = True
    assert out.isinf().tolist() == barred


def test_ignore_eos_leaves_eos_an_ordinary_token():
    params = SamplingParams(min_new_tokens=3, stop_token_ids=(2,), ignore_eos=True)
    out = process_logits(torch.zeros(1, 4), params, [1], 1, eos_token_ids=(0,))
    assert out.isinf().tolist() == [[False, False, True, False]]


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, [0, 2]),
        ({"top_k": 3}, [0, 2, 3]),
        ({"top_p": 0.3}, [0, 2]),
        ({"top_k": 1}, [0]),
        ({"min_p": 1.0}, [0, 2, 3, 5]),
    ],
)
def test_ties_keep_the_lower_id(params, kept):
    logits = torch.tensor([[2.0, -9.0, 2.0, 2.0, -9.0, 2.0]])
    out = process_logits(logits, SamplingParams(temperature=1.0, **params), [], 0)
    assert (~out[0].isinf()).nonzero().flatten().tolist() == kept


@pytest.mark.parametrize("temperature", [1e-6, 1e-40, 5e-324, 1.0, 1e6])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_extreme_values_give_a_distribution(temperature, top_p):
    params = SamplingParams(temperature=temperature, top_p=top_p, min_p=1e-30)
    logits = torch.tensor([[3e38, -3e38, 0.0, -INF], [1e4, 1e4 - 1, -1e4, -INF], [0, -INF, -1, 1]])
    p = probs(process_logits(logits, params, [], 0))
    assert p.isfinite().all()
    torch.testing.assert_close(p.sum(1), torch.ones(3))
    assert (p[logits == -INF] == 0).all()
    if temperature <= 1e-6:
        assert p.argmax(1).tolist() == [0, 0, 3]
        torch.testing.assert_close(p.amax(1), torch.ones(3))


@st.composite
def requests(draw):
    vocab = draw(st.integers(2, 12))
    ids = st.integers(0, vocab - 1)
    # A coarse grid, so that ties are common.
    grid = st.integers(-6, 6).map(lambda x: x / 2)
    params = SamplingParams(
        temperature=draw(st.sampled_from([1e-6, 0.5, 1.0, 3.0])),
        top_k=draw(st.integers(0, vocab + 1)),
        top_p=draw(st.floats(0.01, 1.0)),
        min_p=draw(st.sampled_from([0.0, 0.1, 0.9])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.5, 0.5])),
        presence_penalty=draw(st.sampled_from([0.0, 1.0])),
        frequency_penalty=draw(st.sampled_from([0.0, -0.5])),
        min_new_tokens=draw(st.integers(0, 4)),
    )
    history = draw(st.lists(ids, min_size=1, max_size=6))
    drafted = draw(st.lists(ids, max_size=3))
    rows = draw(
        st.lists(
            st.lists(grid, min_size=vocab, max_size=vocab),
            min_size=len(drafted) + 1, max_size=len(drafted) + 1,
        )
    )  # fmt: skip
    return torch.tensor(rows), params, history, draw(st.integers(1, len(history))), drafted


@settings(max_examples=150, deadline=None)
@given(requests())
def test_invariants(request):
    logits, params, history, num_prompt, drafted = request
    out = process_logits(logits, params, history, num_prompt, drafted, (0,))
    loose = SamplingParams(**{**params.model_dump(), "top_k": 0, "top_p": 1.0, "min_p": 0.0})
    full = process_logits(logits, loose, history, num_prompt, drafted, (0,))
    for i in range(len(logits)):
        alone = process_logits(
            logits[i : i + 1], params, [*history, *drafted[:i]], num_prompt, (), (0,)
        )
        assert torch.equal(alone[0], out[i]), "a row's numbers must not depend on other rows"
        kept = ~out[i].isinf()
        assert kept[full[i].argmax()], "the most probable token stays"
        assert torch.equal(out[i][kept], full[i][kept]), "kept tokens keep their odds"
        num_kept = int(kept.sum())
        assert num_kept <= (params.top_k or num_kept)
        order = sorted(range(logits.shape[1]), key=lambda t, i=i: (-full[i, t].item(), t))
        assert set(order[:num_kept]) == set(kept.nonzero().flatten().tolist())
        if params.top_k == 0 and params.min_p == 0:
            p = full[i].double().softmax(0)[order]
            assert p[:num_kept].sum() >= params.top_p - 1e-6, "the nucleus reaches top_p"
            assert num_kept == 1 or p[: num_kept - 1].sum() < params.top_p + 1e-6


def test_uniforms_are_the_next_of_each_stream():
    streams, twins = ([RandomStream(5), RandomStream(6, 100)] for _ in range(2))
    for counts in ([3, 1], [0, 2]):
        drawn = uniforms(streams, counts, 3, torch.device("cpu"))
        assert drawn.shape == (2, 3)
        for twin, own, count in zip(twins, drawn.tolist(), counts, strict=True):
            assert own[:count] == [twin.uniform() for _ in range(count)]
    assert [s.offset for s in streams] == [t.offset for t in twins] == [3, 103]


def test_inverse_cdf_gives_each_token_its_share():
    rng = random.Random(0)
    for _ in range(50):
        weights = [rng.choice([0.0, rng.random(), rng.random() * 1e-3]) for _ in range(6)]
        weights[rng.randrange(6)] = 1.0
        total, reached = sum(weights), 0.0
        for token, weight in enumerate(weights):
            share = weight / total
            for inside in (1e-9, 0.5, 1 - 1e-9) if share else ():
                u = reached + share * inside
                assert inverse_cdf(torch.tensor(weights, dtype=torch.float64), u) == token
            reached += share


def test_inverse_cdf_never_returns_an_impossible_token():
    weights = torch.tensor([0.0, 0.0, 0.3, 0.0, 0.7, 0.0, 0.0])
    for u in (0.0, 2**-53, 0.3, 0.5, 1 - 2**-53):
        assert weights[inverse_cdf(weights, u)] > 0
    rng = random.Random(1)
    for _ in range(200):
        w = torch.tensor([rng.random() for _ in range(5)], dtype=torch.float64)
        assert inverse_cdf(torch.cat([w, torch.zeros(2)]), 1 - 2**-53) <= 4


@pytest.mark.parametrize("weights", [[0.0, 0.0], [math.nan, 1.0], [INF, 1.0]])
def test_inverse_cdf_rejects_what_is_no_distribution(weights):
    with pytest.raises(ConfigError, match="expected a positive number"):
        inverse_cdf(torch.tensor(weights), 0.5)


def test_nan_logits_raise_instead_of_sampling():
    logits = torch.tensor([[0.0, math.nan, 1.0]])
    out = process_logits(logits, SamplingParams(temperature=1.0, top_k=2, top_p=0.9), [], 0)
    with pytest.raises(ConfigError, match="NaN"):
        sample(probs(out)[0], RandomStream(0))


def test_sample_uses_one_draw_and_no_global_state():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    stream, twin = RandomStream(9), RandomStream(9)
    distribution = torch.tensor([0.1, 0.2, 0.3, 0.4])
    for _ in range(20):
        assert sample(distribution, stream) == inverse_cdf(distribution, twin.uniform())
    assert torch.equal(torch.get_rng_state(), state)


def test_token_logprobs_against_float64():
    logits = random_logits(3, 20, seed=7)
    chosen, top = token_logprobs(logits, [4, 0, 19], 5)
    wanted = logits.double().log_softmax(1)
    assert chosen == pytest.approx(
        [wanted[i, t].item() for i, t in enumerate([4, 0, 19])], abs=1e-5
    )
    for i, row in enumerate(top):
        order = wanted[i].argsort(descending=True)[:5].tolist()
        assert list(row) == order
        assert list(row.values()) == pytest.approx(wanted[i][order].tolist(), abs=1e-5)


def test_token_logprobs_ties_and_limits():
    chosen, top = token_logprobs(torch.tensor([[1.0, 0.0, 1.0, 1.0, -INF]]), [4], 2)
    assert chosen == (-INF,)
    assert list(top[0]) == [0, 2]
    assert token_logprobs(torch.zeros(2, 3), [0, 1], 0)[1] == ({}, {})
    assert list(token_logprobs(torch.zeros(1, 3), [0], 100)[1][0]) == [0, 1, 2]
    assert token_logprobs(torch.zeros(0, 3), [], 2) == ((), ())


@pytest.mark.parametrize("first", [1, 2])
def test_later_rows_alone_are_those_of_the_whole(first):
    params = SamplingParams(
        temperature=0.7, repetition_penalty=1.4, frequency_penalty=0.5, min_new_tokens=5
    )
    logits, drafted = random_logits(4, 9, seed=2), [3, 3, 8]
    whole = process_logits(logits, params, [1, 3, 4], 1, drafted, (0,))
    later = process_logits(
        logits[first:], params, [1, 3, 4], 1, torch.tensor(drafted), (0,), first=first
    )
    assert torch.equal(later, whole[first:])
    assert later[0, 0] == -INF
