"""What a pass predicts: the numbers that rules ask for, against plain formulas."""

import math

import pytest
import torch

from hybrid.decode.slots import Slots
from hybrid.params import SamplingParams
from hybrid.streams import RandomStream

NONE = torch.finfo(torch.float32).min  # as the loop sets the mask token's
LOGITS = torch.tensor([[0.0, 1.0, 2.0, NONE], [3.0, 3.0, 0.0, NONE], [0.0, 0.0, 0.0, NONE]])


def make(logits=LOGITS, seed=0, raw=False, **sampling):
    return Slots(
        logits,
        torch.arange(len(logits)),
        masked=torch.ones(len(logits), dtype=torch.bool),
        current=torch.zeros(len(logits), dtype=torch.long),
        sampling=SamplingParams(**sampling),
        stream=RandomStream(seed),
        raw_confidence=raw,
    )


def test_greedy_scores_are_those_of_the_softmax():
    slots = make()
    law = LOGITS.double().softmax(dim=-1)
    assert slots.tokens.tolist() == [2, 0, 0]  # ties to the lowest id
    torch.testing.assert_close(slots.confidence.double(), law.amax(dim=-1), rtol=0, atol=1e-6)
    entropy = torch.tensor([-sum(p * math.log(p) for p in row if p > 0) for row in law.tolist()])
    torch.testing.assert_close(slots.entropy, entropy.double(), rtol=0, atol=1e-6)
    best = law.sort(descending=True).values
    margin = (best[:, 0] - best[:, 1]).float()
    torch.testing.assert_close(slots.margin, margin, rtol=0, atol=1e-6)


def test_truncation_counts_for_the_scores_of_a_greedy_row():
    slots = make(top_k=2)
    assert slots.tokens.tolist() == [2, 0, 0]
    expected = math.exp(2) / (math.exp(2) + math.exp(1))
    assert abs(slots.confidence[0].item() - expected) < 1e-6
    assert abs(slots.entropy[1].item() - math.log(2)) < 1e-6
    raw = make(top_k=2, raw=True)
    assert abs(raw.confidence[0].item() - LOGITS[0].softmax(0)[2].item()) < 1e-6


def test_sampled_tokens_follow_the_row_own_stream_and_their_law():
    counts = torch.zeros(4)
    for seed in range(2000):
        counts[make(LOGITS[:1], seed=seed, temperature=0.5).tokens] += 1
    law = (LOGITS[0] / 0.5).softmax(dim=0)
    assert counts[3] == 0
    chi = ((counts[:3] - 2000 * law[:3]) ** 2 / (2000 * law[:3])).sum().item()
    assert chi < 13.8  # p = 0.001 with 2 degrees of freedom
    one, other = make(seed=7, temperature=1.0), make(seed=7, temperature=1.0)
    assert one.tokens.tolist() == other.tokens.tolist()
    law = LOGITS.softmax(dim=-1)
    expected = law.gather(1, one.tokens[:, None])[:, 0]
    torch.testing.assert_close(one.confidence, expected.double(), rtol=0, atol=1e-6)


def test_numbers_are_computed_once():
    slots = make(temperature=1.0)
    assert slots.tokens is slots.tokens
    assert slots.random is slots.random


def test_the_only_token_has_all_the_margin():
    assert make(top_k=1).margin.tolist() == [1.0, 1.0, 1.0]
    assert make(top_p=0.1).entropy.abs().max() < 1e-11


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}])
def test_nearly_certain_slots_keep_their_order(sampling):
    gaps = torch.tensor([18.0, 22.0, 20.0, 25.0])  # float32 knows the last three as probability 1
    logits = torch.stack([gaps, torch.zeros(4), torch.zeros(4)], dim=1)
    slots = make(logits, **sampling)
    law = logits.double().softmax(dim=-1)
    exact = law.amax(dim=-1)
    torch.testing.assert_close(1 - slots.confidence, 1 - exact, rtol=1e-6, atol=0)
    assert slots.confidence.argsort(descending=True).tolist() == [3, 1, 2, 0]
    entropy = -torch.special.xlogy(law, law).sum(dim=-1)
    torch.testing.assert_close(slots.entropy, entropy, rtol=1e-3, atol=1e-11)
    assert slots.entropy.argsort().tolist() == [3, 1, 2, 0]
