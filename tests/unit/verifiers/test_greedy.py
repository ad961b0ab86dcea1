"""Greedy verification against a one-token-at-a-time twin."""

from __future__ import annotations

import itertools

import pytest
import torch

from hybrid.errors import ConfigError
from hybrid.params import SamplingParams
from hybrid.streams import RandomStream
from hybrid.types import Proposal, Verdict
from hybrid.verifiers.greedy import GreedyVerifier

GREEDY = SamplingParams()


def verify(logits, tokens, num_tokens):
    proposal = Proposal(torch.tensor(tokens).reshape(len(num_tokens), -1), num_tokens)
    batch = len(num_tokens)
    return GreedyVerifier().verify(logits, proposal, [GREEDY] * batch, [RandomStream(0)] * batch)


def test_every_proposal_of_a_small_vocabulary():
    """All 27 proposals of every length 0..3, disagreeing ones included."""
    logits = torch.randn(1, 4, 3, generator=torch.Generator().manual_seed(0))
    best = logits[0].argmax(1).tolist()
    for tokens in itertools.product(range(3), repeat=3):
        for num_tokens in range(4):
            accepted = 0
            for i in range(num_tokens):
                if tokens[i] != best[i]:
                    break
                accepted += 1
            assert verify(logits, tokens, (num_tokens,)) == Verdict((accepted,), (best[accepted],))


def test_committed_tokens_are_what_ar_decoding_gives():
    """Steps with a drafter that is right about half the time repeat the target's own sequence."""
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(7, 7, generator=generator)  # logits of the token after each token
    sequence = [0]
    for _ in range(30):
        sequence.append(int(table[sequence[-1]].argmax()))
    committed = [0]
    while len(committed) < 25:
        drafted = [
            t if torch.rand((), generator=generator) < 0.5 else (t + 1) % 7
            for t in sequence[len(committed) : len(committed) + 3]
        ]
        verdict = verify(table[[committed[-1], *drafted]][None], drafted, (3,))
        committed += [*drafted[: verdict.num_accepted[0]], verdict.next_token[0]]
    assert committed == sequence[: len(committed)]


def test_ties_go_to_the_lowest_id():
    assert verify(torch.zeros(1, 2, 4), [0], (1,)) == Verdict((1,), (0,))
    assert verify(torch.zeros(1, 2, 4), [1], (1,)) == Verdict((0,), (0,))


def test_ragged_rows():
    logits = torch.full((3, 3, 4), -1.0)
    logits[:, 0, 1] = logits[:, 1, 2] = logits[:, 2, 3] = 1.0
    verdict = verify(logits, [[1, 2], [1, 2], [1, 2]], (0, 1, 2))
    assert verdict == Verdict((0, 1, 2), (1, 2, 3))


def test_no_draft_is_plain_decoding():
    logits = torch.eye(3)[None, 2:, :]
    assert verify(logits, [], (0,)) == Verdict((0,), (2,))


def test_one_host_sync_for_the_batch(monkeypatch):
    calls = []
    real = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: calls.append(1) or real(self))
    for name in ("item", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, lambda self, name=name: calls.append(name))
    verify(torch.zeros(5, 4, 6), [[0, 0, 0]] * 5, (3,) * 5)
    assert calls == [1]


def test_a_sampled_row_is_refused():
    proposal = Proposal(torch.zeros(2, 0, dtype=torch.long), (0, 0))
    sampling = [GREEDY, SamplingParams(temperature=0.5)]
    with pytest.raises(ConfigError, match=r"temperature 0\.5, expected 0.*'rejection'"):
        GreedyVerifier().verify(torch.zeros(2, 1, 3), proposal, sampling, [RandomStream(0)] * 2)
