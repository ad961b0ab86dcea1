"""Verification behind tokens that are committed anyway, and the evidence on these, by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from hybrid import registry
from hybrid.decode.judging import judge_draft
from hybrid.params import SamplingParams
from hybrid.streams import RandomStream
from hybrid.types import Proposal, Route, SequenceState

B, K, V = 4, 3, 4
COUNTS, UNVERIFIED = (3, 2, 3, 0), (1, 2, 0, 0)


def engine_of(params, verifier="rejection", *, wants_features=False, num_rows=B, seed=0):
    rows = [
        SequenceState(b, [1, 2, b], 1, own, RandomStream(B * seed + b))
        for b, own in zip(range(num_rows), params, strict=False)
    ]
    return SimpleNamespace(
        rows=rows,
        router=SimpleNamespace(wants_features=wants_features),
        verifier=registry.load("verifier", verifier)(),
        backbone=SimpleNamespace(eos_token_ids=()),
    )


def judge(engine, logits, proposal, routes):
    return judge_draft(engine, logits, proposal, proposal, routes)


def random_case(seed, *, has_laws):
    generator = torch.Generator().manual_seed(seed)
    laws = torch.rand(B, K, V, generator=generator).softmax(-1)
    tokens = torch.multinomial(laws.view(-1, V), 1, generator=generator).view(B, K)
    logits = torch.randn(B, K + 1, V, generator=generator)
    logits[:, :K].scatter_add_(2, tokens[..., None], torch.full((B, K, 1), 1.5))  # often right
    return logits, Proposal(tokens, COUNTS, laws if has_laws else None)


@pytest.mark.parametrize("has_laws", [True, False], ids=["laws", "points"])
@pytest.mark.parametrize("temperature", [0.0, 1.0, "mixed"])
@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_what_follows_is_verified_as_in_the_state_behind(verifier, temperature, has_laws):
    """The twin judges each row by itself, from its first verified token on, at the same stream."""
    temperatures = [0.0, 1.0] * 2 if temperature == "mixed" else [temperature] * B
    params = [SamplingParams(temperature=t) for t in temperatures]
    accepted_more = 0
    for seed in range(12):
        logits, proposal = random_case(seed, has_laws=has_laws)
        engine = engine_of(params, verifier, seed=seed)
        routes = [Route(n, u) for n, u in zip(COUNTS, UNVERIFIED, strict=True)]
        verdict = judge(engine, logits, proposal, routes).verdict
        for b, (n, u) in enumerate(zip(COUNTS, UNVERIFIED, strict=True)):
            twin = engine_of(params, verifier, seed=seed).rows[b]
            own = logits[b : b + 1]
            if temperatures[b]:  # as the transforms shift it: the largest is 0
                own = own - own.amax(-1, keepdim=True)
            laws = None if proposal.draft_probs is None else proposal.draft_probs[b : b + 1, u:n]
            rest = Proposal(proposal.tokens[b : b + 1, u:n], (n - u,), laws)
            expected = engine.verifier.verify(
                own[:, u : n + 1], rest, [twin.sampling], [twin.stream]
            )
            assert verdict.num_accepted[b] == u + expected.num_accepted[0]
            assert verdict.next_token[b] == expected.next_token[0]
            ours = engine.rows[b].stream.offset
            assert ours == twin.stream.offset, "draws for what it did not judge"
            accepted_more += expected.num_accepted[0]
    assert accepted_more > 5


def test_greedy_disagreement_is_another_argmax():
    logits = torch.zeros(B, K + 1, 6)
    for t, best in enumerate((2, 4, 1, 0)):
        logits[:, t, best] = 1.0
    tokens = torch.tensor([[2, 5, 1]] * B)
    routes = [Route(3, u) for u in (0, 1, 2, 3)]
    engine = engine_of([SamplingParams()] * B)
    judged = judge(engine, logits, Proposal(tokens, (3,) * B), routes)
    assert judged.disagreements == ((), (0.0,), (0.0, 1.0), (0.0, 1.0, 0.0))
    # Row 0: verified, rejected at the second. Row 1: so it is. Rows 2, 3: that one is committed.
    assert judged.verdict.num_accepted == (1, 1, 3, 3)
    assert judged.verdict.next_token == (4, 4, 0, 0)


def test_sampled_disagreement_is_the_probability_of_a_rejection():
    """1 - min(1, p / q) after the transforms; a point mass is accepted with probability p."""
    p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.6, 0.2, 0.2]])
    q = torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.6, 0.2]])
    tokens = torch.tensor([[1, 1]])
    params = [SamplingParams(temperature=1.0)]

    def doubts(laws, **fields):
        engine = engine_of([params[0].replace(**fields)], num_rows=1)
        proposal = Proposal(tokens, (2,), laws)
        return judge(engine, p.log()[None], proposal, [Route(2, 2)]).disagreements[0]

    assert doubts(q[None]) == pytest.approx((1 - 0.3 / 0.5, 1 - 0.1 / 0.6), abs=1e-6)
    # Laws count after they are normalised, as in verification.
    assert doubts(1.01 * q[None]) == pytest.approx((1 - 0.3 / 0.5, 1 - 0.1 / 0.6), abs=1e-6)
    assert doubts(None) == pytest.approx((0.7, 0.9), abs=1e-6)
    # Temperature 1/2 squares: 0.09 / 0.38 and 0.01 / 0.66. Top-k 1 keeps another token.
    squared = (1 - 0.09 / 0.38 / 0.5, 1 - 0.01 / 0.66 / 0.6)
    assert doubts(q[None], temperature=0.5) == pytest.approx(squared, abs=1e-6)
    assert doubts(q[None], top_k=1) == (1.0, 1.0)
    rarer = torch.tensor([[[0.8, 0.1, 0.1], [0.3, 0.1, 0.6]]])
    assert doubts(rarer) == (0.0, pytest.approx(0.0, abs=1e-6))


def test_the_entropy_is_that_of_the_law_behind_the_next_token():
    logits = torch.zeros(2, 3, 4)
    logits[:, :, 0] = torch.tensor([0.0, 5.0, 9.0])
    tokens = torch.tensor([[0, 0], [0, 1]])
    params = [SamplingParams(), SamplingParams()]
    engine = engine_of(params, wants_features=True, num_rows=2)
    judged = judge(engine, logits, Proposal(tokens, (2, 2)), [Route(2), Route(2)])
    assert judged.verdict.num_accepted == (2, 1)

    def entropy(best):
        law = [math.exp(best), 1, 1, 1]
        return -sum(w / sum(law) * math.log(w / sum(law)) for w in law)

    assert judged.next_entropy == pytest.approx((entropy(9.0), entropy(5.0)), abs=1e-5)
    engine = engine_of([SamplingParams(temperature=1.0, top_k=1)], wants_features=True, num_rows=1)
    judged = judge(engine, logits[:1], Proposal(tokens[:1], (2,)), [Route(2)])
    assert judged.next_entropy == (0.0,), "after the transforms one token is left"
    engine = engine_of(params, num_rows=2)
    judged = judge(engine, logits, Proposal(tokens, (2, 2)), [Route(2), Route(2)])
    assert judged.next_entropy == (None, None)
