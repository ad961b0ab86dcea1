"""What every registered verifier must do; the contract is `hybrid.protocols.Verifier`."""

from __future__ import annotations

import math

import pytest
import torch

from hybrid import registry
from hybrid.errors import ConfigError, ProposalError
from hybrid.params import SamplingParams
from hybrid.protocols import Verifier
from hybrid.streams import RandomStream
from hybrid.types import Proposal, Verdict

GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=1.0)
VOCAB, WIDTH = 6, 3


def can_sample(name: str) -> bool:
    proposal = Proposal(torch.zeros(1, 0, dtype=torch.long), (0,))
    try:
        registry.load("verifier", name)().verify(
            torch.zeros(1, 1, VOCAB), proposal, [SAMPLED], [RandomStream(0)]
        )
    except ConfigError:
        return False
    return True


NAMES = sorted(registry.names("verifier"))
SAMPLING_NAMES = [name for name in NAMES if can_sample(name)]
ALL = [(name, GREEDY) for name in NAMES] + [(name, SAMPLED) for name in SAMPLING_NAMES]
each_mode = pytest.mark.parametrize(
    ("name", "params"), ALL, ids=[f"{n}-{'sampled' if p.temperature else 'greedy'}" for n, p in ALL]
)


class Batch:
    """Four ragged rows with random logits; half of the drafted tokens are the argmax."""

    num_tokens = (3, 0, 2, 1)

    def __init__(self, seed: int, *, with_probs: bool, truncated: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        batch = len(self.num_tokens)
        self.logits = torch.randn(batch, WIDTH + 1, VOCAB, generator=generator) * 2
        if truncated:
            self.logits[self.logits < self.logits.median()] = -math.inf
        drafted = torch.randint(VOCAB, (batch, WIDTH), generator=generator)
        agree = torch.rand(batch, WIDTH, generator=generator) < 0.5
        self.tokens = torch.where(agree, self.logits[:, :WIDTH].argmax(-1), drafted)
        draft = torch.rand(batch, WIDTH, VOCAB, generator=generator) + 0.05
        self.draft_probs = draft / draft.sum(-1, keepdim=True) if with_probs else None

    def verify(self, verifier, params, rows=None, width=WIDTH, seed=100):
        rows = list(range(len(self.num_tokens))) if rows is None else rows
        draft = None if self.draft_probs is None else self.draft_probs[rows, :width]
        proposal = Proposal(
            self.tokens[rows, :width], tuple(self.num_tokens[r] for r in rows), draft
        )
        streams = [RandomStream(seed + r) for r in rows]
        verdict = verifier.verify(
            self.logits[rows, : width + 1], proposal, [params] * len(rows), streams
        )
        return verdict, streams


def batches():
    return [Batch(seed, with_probs=bool(seed % 2), truncated=seed % 3 == 0) for seed in range(12)]


def test_the_built_in_verifiers_are_registered():
    assert {"greedy", "rejection", "block"} <= set(NAMES)
    assert {"rejection", "block"} <= set(SAMPLING_NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_a_verifier(name):
    verifier = registry.load("verifier", name)()
    assert isinstance(verifier, Verifier)
    assert verifier.name == name
    assert isinstance(verifier.lossless, bool)


@each_mode
def test_verdict_is_in_range_and_possible(name, params):
    verifier = registry.load("verifier", name)()
    for batch in batches():
        verdict, _ = batch.verify(verifier, params)
        assert isinstance(verdict, Verdict)
        for b, (accepted, token) in enumerate(
            zip(verdict.num_accepted, verdict.next_token, strict=True)
        ):
            assert type(accepted) is int
            assert type(token) is int
            assert 0 <= accepted <= batch.num_tokens[b]
            committed = [*batch.tokens[b, :accepted].tolist(), token]
            for i, committed_token in enumerate(committed):
                assert batch.logits[b, i, committed_token] > -math.inf


@each_mode
def test_a_row_does_not_depend_on_the_batch(name, params):
    verifier = registry.load("verifier", name)()
    for batch in batches():
        together, streams = batch.verify(verifier, params)
        for b, num_tokens in enumerate(batch.num_tokens):
            alone, (stream,) = batch.verify(verifier, params, rows=[b], width=num_tokens)
            assert alone.num_accepted[0] == together.num_accepted[b]
            assert alone.next_token[0] == together.next_token[b]
            assert stream.offset == streams[b].offset
        reverse, _ = batch.verify(verifier, params, rows=[3, 2, 1, 0])
        assert reverse.num_accepted == together.num_accepted[::-1]
        assert reverse.next_token == together.next_token[::-1]


@each_mode
def test_padding_never_matters(name, params):
    verifier = registry.load("verifier", name)()
    for batch in batches():
        clean, _ = batch.verify(verifier, params)
        for b, num_tokens in enumerate(batch.num_tokens):
            batch.logits[b, num_tokens + 1 :] = math.nan
            batch.tokens[b, num_tokens:] = -1
            if batch.draft_probs is not None:
                batch.draft_probs[b, num_tokens:] = math.nan
        assert batch.verify(verifier, params)[0] == clean


@each_mode
def test_same_seed_same_verdict_and_inputs_untouched(name, params):
    verifier = registry.load("verifier", name)()
    batch = Batch(1, with_probs=True)
    before = [t.clone() for t in (batch.logits, batch.tokens, batch.draft_probs)]
    state = torch.get_rng_state()
    first, _ = batch.verify(verifier, params)
    assert batch.verify(verifier, params)[0] == first
    for tensor, copy in zip((batch.logits, batch.tokens, batch.draft_probs), before, strict=True):
        assert torch.equal(tensor, copy)
    assert torch.equal(torch.get_rng_state(), state), "the global random state was used"


@each_mode
def test_draws_do_not_depend_on_the_outcome(name, params):
    """The number of draws is a matter of the row's proposal alone, not of the target."""
    verifier = registry.load("verifier", name)()
    states = set()
    outcomes = set()
    for seed in range(8):
        batch = Batch(seed, with_probs=False)
        verdict, streams = batch.verify(verifier, params)
        outcomes.add(verdict.num_accepted)
        states.add(streams[0].offset)
    assert len(outcomes) > 1
    assert len(states) == 1


@pytest.mark.parametrize("name", NAMES)
def test_greedy_rows_follow_the_argmax_whatever_is_drafted(name):
    verifier = registry.load("verifier", name)()
    if not verifier.lossless:
        pytest.skip("only a lossless verifier promises the argmax")
    for batch in batches():
        verdict, _ = batch.verify(verifier, GREEDY)
        best = batch.logits.argmax(-1).tolist()
        for b, accepted in enumerate(verdict.num_accepted):
            drafted = batch.tokens[b].tolist()
            committed = [*drafted[:accepted], verdict.next_token[b]]
            assert committed == best[b][: accepted + 1]
            if accepted < batch.num_tokens[b]:
                assert drafted[accepted] != best[b][accepted], "a right token was refused"


@pytest.mark.parametrize("name", SAMPLING_NAMES)
def test_greedy_and_sampled_rows_share_a_batch(name):
    verifier = registry.load("verifier", name)()
    batch = Batch(5, with_probs=True)
    proposal = Proposal(batch.tokens, batch.num_tokens, batch.draft_probs)
    streams = [RandomStream(100 + b) for b in range(4)]
    mixed = verifier.verify(batch.logits, proposal, [GREEDY, SAMPLED, SAMPLED, GREEDY], streams)
    greedy, sampled = (batch.verify(verifier, params)[0] for params in (GREEDY, SAMPLED))
    for b, source in enumerate((greedy, sampled, sampled, greedy)):
        assert mixed.num_accepted[b] == source.num_accepted[b]
        assert mixed.next_token[b] == source.next_token[b]


@pytest.mark.parametrize("name", SAMPLING_NAMES)
def test_impossible_draft_token_is_an_error(name):
    verifier = registry.load("verifier", name)()
    batch = Batch(1, with_probs=True)
    batch.draft_probs[0, 1, batch.tokens[0, 1]] = 0.0
    with pytest.raises(ProposalError, match="expected more than 0"):
        batch.verify(verifier, SAMPLED)
