"""The token rule's edges; its distribution is tests/property/test_verifiers_exact.py."""

from __future__ import annotations

import math

import pytest
import torch

from hybrid.errors import ConfigError, ProposalError
from hybrid.params import SamplingParams
from hybrid.sampling import inverse_cdf
from hybrid.streams import RandomStream
from hybrid.types import Proposal, Verdict
from hybrid.verifiers.block import BlockVerifier
from hybrid.verifiers.rejection import (
    RejectionVerifier,
    accept_by_token,
    excess,
    likelihood_ratios,
    verify_rows,
)

INF = math.inf
SAMPLED = SamplingParams(temperature=1.0)


def dist(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def test_threshold_is_the_likelihood_ratio():
    target, draft = dist((0.2, 0.8), (0.5, 0.5)), dist((0.5, 0.5))
    accepted, weights = accept_by_token(target, draft, [0], [0.399999])
    assert (accepted, weights.tolist()) == (1, [0.5, 0.5])
    accepted, weights = accept_by_token(target, draft, [0], [0.400001])
    assert accepted == 0
    assert weights.tolist() == pytest.approx([0, 0.3])


def test_a_rejected_point_mass_excludes_the_token():
    accepted, weights = accept_by_token(dist((0.2, 0.5, 0.3), (1, 0, 0)), None, [1], [0.5])
    assert (accepted, weights.tolist()) == (0, [0.2, 0.0, 0.3])


def test_equal_distributions_never_reject():
    p = torch.rand(2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    p = p / p.sum(1, keepdim=True)
    for token in range(50):
        assert accept_by_token(p, p[:1], [token], [1 - 2**-53])[0] == 1


def test_a_residual_lost_to_rounding_falls_back_to_the_target():
    def rule(target_probs, draft_probs, tokens, uniforms):
        return 1, torch.zeros_like(target_probs[0])

    logits = torch.tensor([[[0.0, 0.0, 0.0], [-INF, 0.0, -INF]]])
    proposal = Proposal(torch.tensor([[0]]), (1,))
    verdict = verify_rows(rule, logits, proposal, [SAMPLED], [RandomStream(0)])
    assert verdict == Verdict((1,), (1,))


def test_draft_probs_that_exclude_their_token_raise():
    proposal = Proposal(torch.tensor([[0, 1]]), (2,), torch.tensor([[[0.5, 0.5], [1.0, 0.0]]]))
    with pytest.raises(ProposalError, match="token 1 at draft position 1"):
        RejectionVerifier().verify(torch.zeros(1, 3, 2), proposal, [SAMPLED], [RandomStream(0)])


def test_nan_in_draft_probs_raises():
    with pytest.raises(ProposalError, match="nan"):
        likelihood_ratios(dist((0.5, 0.5)), dist((math.nan, 0.5)), [0])


@pytest.mark.parametrize("verifier", [RejectionVerifier(), BlockVerifier()])
@pytest.mark.parametrize("row", [0, 1])
def test_nan_logits_raise(row, verifier):
    logits = torch.zeros(1, 2, 3)
    logits[0, 0, 0] = 1000.0  # token 0 is accepted, so that row 1 is read
    logits[0, row, 1] = math.nan
    proposal = Proposal(torch.tensor([[0]]), (1,))
    with pytest.raises(ConfigError, match="NaN"):
        verifier.verify(logits, proposal, [SAMPLED], [RandomStream(0)])


def test_float32_draft_rows_count_as_normalised():
    """A draft row that adds up to 2 is the same distribution as its half."""
    logits = torch.randn(1, 2, 4, generator=torch.Generator().manual_seed(0))
    row = torch.tensor([[[0.1, 0.2, 0.3, 0.4]]])
    for seed in range(30):
        verdicts = [
            RejectionVerifier().verify(
                logits,
                Proposal(torch.tensor([[3]]), (1,), scale * row),
                [SAMPLED],
                [RandomStream(seed)],
            )
            for scale in (1, 2)
        ]
        assert verdicts[0] == verdicts[1]


def test_no_draft_is_one_ordinary_sample():
    logits = torch.randn(1, 1, 6, generator=torch.Generator().manual_seed(0))
    proposal = Proposal(torch.zeros(1, 0, dtype=torch.long), (0,))
    for seed in range(20):
        stream, twin = RandomStream(seed), RandomStream(seed)
        verdict = RejectionVerifier().verify(logits, proposal, [SAMPLED], [stream])
        wanted = inverse_cdf(logits[0, 0].double().softmax(0), twin.uniform())
        assert verdict == Verdict((0,), (wanted,))


def test_excess_leaves_its_input_alone():
    p = dist((0.25, 0.75))
    assert excess(p, None, [1]).tolist() == [[0.25, 0.0]]
    assert p.tolist() == [[0.25, 0.75]]
    assert excess(p, dist((0.5, 0.5)), [0]).tolist() == [[0.0, 0.25]]
    assert excess(p[:0], None, []).shape == (0, 2)
