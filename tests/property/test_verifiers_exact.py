"""The verifiers' output distribution, computed exactly and compared with the target's.

An accept rule maps K uniform numbers to (num_accepted, weights of the next token). As a function
of the uniforms it is constant on the 2^K boxes between its thresholds. The thresholds are found by
bisection of the shipped rule, nothing is re-derived here; the box structure itself is checked with
random points; `inverse_cdf`, the last step, is checked the same way in test_sampling.py, and
`verify` end to end below, so that the chain has no untested link.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid.params import SamplingParams
from hybrid.streams import RandomStream
from hybrid.types import Proposal
from hybrid.verifiers.block import BlockVerifier, accept_by_block
from hybrid.verifiers.rejection import RejectionVerifier, accept_by_token

RULES = {"rejection": accept_by_token, "block": accept_by_block}
VERIFIERS = {"rejection": RejectionVerifier, "block": BlockVerifier}
ALMOST_ONE = 1 - 2**-53
FLAVOURS = ("dense", "zeros", "truncated", "near")
Context = tuple[int, ...]
Dist = tuple[float, ...]


class Instance:
    """A target and a drafter: one random distribution per context, as a language model has."""

    def __init__(self, seed: int, vocab: int, num_draft: int, flavour: str) -> None:
        self.vocab, self.num_draft = vocab, num_draft
        rng = random.Random(f"{seed}-{vocab}-{num_draft}-{flavour}")
        self.target: dict[Context, Dist] = {}
        self.draft: dict[Context, Dist] = {}
        for length in range(num_draft + 1):
            for context in itertools.product(range(vocab), repeat=length):
                self.target[context] = self._distribution(rng, flavour, is_target=True)
                self.draft[context] = self._distribution(rng, flavour, is_target=False)
                if flavour == "near":
                    self.draft[context] = self._nudged(rng, self.target[context])

    def _nudged(self, rng: random.Random, p: Dist) -> Dist:
        if rng.random() < 0.3:
            return p
        weights = [w * rng.uniform(0.8, 1.25) for w in p]
        return tuple(w / sum(weights) for w in weights)

    def _distribution(self, rng: random.Random, flavour: str, *, is_target: bool) -> Dist:
        weights = [rng.expovariate(1) + 0.02 for _ in range(self.vocab)]
        if flavour == "zeros":
            keep = rng.randrange(self.vocab)
            weights = [w if i == keep or rng.random() < 0.5 else 0.0 for i, w in enumerate(weights)]
        if flavour == "truncated" and is_target:  # top-p 0.6
            order = sorted(range(self.vocab), key=lambda i: -weights[i])
            reached, total = 0.0, sum(weights)
            for i in order:
                weights[i], reached = (
                    (weights[i] if reached < 0.6 else 0.0),
                    reached + weights[i] / total,
                )
        total = sum(weights)
        return tuple(w / total for w in weights)

    def rows(self, table: dict[Context, Dist], tokens: Context, count: int) -> torch.Tensor:
        """Return [count, V]: row i is the distribution after `tokens[:i]`."""
        rows = [table[tokens[:i]] for i in range(count)]
        return torch.tensor(rows, dtype=torch.float64).reshape(count, self.vocab)


def boxes(outcome, num_uniforms, rng):
    """Yield (measure, outcome) of each box of the unit cube on which `outcome(us)` is constant.

    `outcome` returns a tuple that begins with num_accepted.
    """
    thresholds = []
    for i in range(num_uniforms):

        def accepts(u: float, i: int = i) -> bool:
            us = [0.0] * i + [u] + [ALMOST_ONE] * (num_uniforms - i - 1)
            return outcome(us)[0] > i

        thresholds.append(bisect(accepts))
    for below in itertools.product((True, False), repeat=num_uniforms):
        edges = [(0.0, t) if b else (t, 1.0) for b, t in zip(below, thresholds, strict=True)]
        measure = math.prod(high - low for low, high in edges)
        if measure < 1e-9:
            continue
        middle = outcome([(low + high) / 2 for low, high in edges])
        anywhere = outcome(
            [low + (high - low) * rng.uniform(1e-6, 1 - 1e-6) for low, high in edges]
        )
        assert anywhere == middle, "the outcome is not constant between the thresholds"
        yield measure, middle


def bisect(holds) -> float:
    """Return the end of the interval [0, x) on which `holds` is true, to 1e-8."""
    if not holds(0.0):
        return 0.0
    if holds(ALMOST_ONE):
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(27):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return (low + high) / 2


def committed_law(instance, rule, proposals):
    """Return {committed tokens: probability} of one step, given {drafted tokens: probability}.

    `proposals` maps to (probability, draft_probs rows or None).
    """
    law: dict[Context, float] = defaultdict(float)
    rng = random.Random(0)
    for tokens, (chance, draft) in proposals.items():
        target = instance.rows(instance.target, tokens, len(tokens) + 1)

        def outcome(us, target=target, draft=draft, tokens=tokens):
            num_accepted, weights = rule(target, draft, list(tokens), us)
            return num_accepted, tuple((weights / weights.sum()).tolist())

        for measure, (num_accepted, following) in boxes(outcome, len(tokens), rng):
            for token, p in enumerate(following):
                law[(*tokens[:num_accepted], token)] += chance * measure * p
    return law


def stream_error(instance, law) -> float:
    """Return max |probability - target's| over the streams of K+1 tokens.

    A committed run shorter than that is continued by the target itself.
    """
    length = instance.num_draft + 1
    worst = 0.0
    for stream in itertools.product(range(instance.vocab), repeat=length):
        wanted = [instance.target[stream[:i]][stream[i]] for i in range(length)]
        got = sum(law.get(stream[:n], 0.0) * math.prod(wanted[n:]) for n in range(1, length + 1))
        worst = max(worst, abs(got - math.prod(wanted)))
    return worst


def drawn_proposals(instance):
    """Every proposal of a sampling drafter: {tokens: (probability, draft_probs)}."""
    proposals = {}
    for tokens in itertools.product(range(instance.vocab), repeat=instance.num_draft):
        chance = math.prod(instance.draft[tokens[:i]][t] for i, t in enumerate(tokens))
        if chance > 0:
            proposals[tokens] = (chance, instance.rows(instance.draft, tokens, len(tokens)))
    return proposals


def expected_accepted(law) -> float:
    return sum((len(tokens) - 1) * p for tokens, p in law.items())


SIZES = [(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 2), (5, 1), (5, 2), (5, 3)]


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("vocab", "num_draft"), SIZES)
def test_output_distribution_is_the_target(name, vocab, num_draft, flavour):
    for seed in range(2):
        instance = Instance(seed, vocab, num_draft, flavour)
        law = committed_law(instance, RULES[name], drawn_proposals(instance))
        assert sum(law.values()) == pytest.approx(1, abs=1e-6)
        assert stream_error(instance, law) < 1e-6


@pytest.mark.parametrize("flavour", ["dense", "zeros", "truncated"])
@pytest.mark.parametrize("name", RULES)
def test_point_mass_proposals_keep_the_target(name, flavour):
    """Whatever fixed tokens a deterministic drafter proposes, the output follows the target."""
    instance = Instance(2, 3, 2, flavour)
    for tokens in itertools.product(range(3), repeat=2):
        law = committed_law(instance, RULES[name], {tokens: (1.0, None)})
        assert stream_error(instance, law) < 1e-6


@pytest.mark.parametrize("name", RULES)
def test_point_mass_equals_a_one_hot_draft(name):
    instance = Instance(3, 4, 2, "dense")
    for tokens in itertools.product(range(4), repeat=2):
        one_hot = torch.nn.functional.one_hot(torch.tensor(tokens), 4).double()
        point = committed_law(instance, RULES[name], {tokens: (1.0, None)})
        drawn = committed_law(instance, RULES[name], {tokens: (1.0, one_hot)})
        for committed in {*point, *drawn}:
            assert point[committed] == pytest.approx(drawn[committed], abs=1e-7)


@pytest.mark.parametrize("name", RULES)
def test_equal_target_and_draft_accept_everything(name):
    instance = Instance(4, 3, 2, "dense")
    instance.draft = instance.target
    law = committed_law(instance, RULES[name], drawn_proposals(instance))
    assert expected_accepted(law) == pytest.approx(2, abs=1e-7)
    assert stream_error(instance, law) < 1e-6


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_block_never_accepts_fewer_than_rejection(flavour):
    gains = []
    for seed in range(6):
        instance = Instance(seed, 3, 3, flavour)
        accepted = {
            name: expected_accepted(committed_law(instance, rule, drawn_proposals(instance)))
            for name, rule in RULES.items()
        }
        gains.append(accepted["block"] - accepted["rejection"])
    assert min(gains) > -1e-6
    assert max(gains) > 1e-3, "a block rule that never gains is the token rule"


def test_the_papers_example():
    """arXiv:2403.10444, section 2: two tokens drafted, 10/9 accepted by token, 11/9 by block."""
    instance = Instance(0, 2, 2, "dense")
    instance.target = dict.fromkeys(instance.target, (1 / 3, 2 / 3))
    instance.draft = dict.fromkeys(instance.draft, (2 / 3, 1 / 3))
    by_token = committed_law(instance, accept_by_token, drawn_proposals(instance))
    by_block = committed_law(instance, accept_by_block, drawn_proposals(instance))
    assert expected_accepted(by_token) == pytest.approx(10 / 9, abs=1e-6)
    assert expected_accepted(by_block) == pytest.approx(11 / 9, abs=1e-6)


def test_one_drafted_token_makes_both_rules_equal():
    instance = Instance(5, 4, 1, "dense")
    by_token = committed_law(instance, accept_by_token, drawn_proposals(instance))
    by_block = committed_law(instance, accept_by_block, drawn_proposals(instance))
    for committed in {*by_token, *by_block}:
        assert by_block[committed] == pytest.approx(by_token[committed], abs=1e-7)


def test_the_method_detects_a_wrong_rule():
    """Rejection that samples the target instead of the residual must be caught."""

    def wrong(target, draft, tokens, us):
        num_accepted, _ = accept_by_token(target, draft, tokens, us)
        return num_accepted, target[num_accepted]

    instance = Instance(0, 3, 2, "dense")
    assert stream_error(instance, committed_law(instance, wrong, drawn_proposals(instance))) > 1e-3


@pytest.mark.parametrize("name", VERIFIERS)
def test_verify_end_to_end_by_scripted_uniforms(name):
    """`verify` itself, float32 logits and the draw of the next token included, is exact."""
    instance = Instance(6, 3, 2, "zeros")
    script: list[float] = []
    verifier, sampled = VERIFIERS[name](), [SamplingParams(temperature=1.0)]
    streams: Any = [SimpleNamespace(uniform=lambda: script.pop(0))]
    law: dict[Context, float] = defaultdict(float)
    for tokens, (chance, draft) in drawn_proposals(instance).items():
        logits = instance.rows(instance.target, tokens, 3).log().float()[None]
        proposal = Proposal(torch.tensor([tokens]), (2,), draft.float()[None])

        def outcome(us, logits=logits, proposal=proposal, last=0.5):
            script[:] = [*us, last]
            verdict = verifier.verify(logits, proposal, sampled, streams)
            assert not script, "a row of n drafted tokens draws n + 1 numbers"
            return verdict.num_accepted[0], verdict.next_token[0]

        def law_of_last(us, outcome=outcome):
            num_accepted, _ = outcome(us)
            ends = [bisect(lambda u, t=t: outcome(us, last=u)[1] <= t) for t in range(3)]
            return num_accepted, tuple(round(b - a, 7) for a, b in itertools.pairwise([0.0, *ends]))

        rng = random.Random(1)
        for measure, (num_accepted, following) in boxes(law_of_last, 2, rng):
            for token, p in enumerate(following):
                law[(*tokens[:num_accepted], token)] += chance * measure * p
    assert stream_error(instance, law) < 1e-6


@pytest.mark.parametrize("name", VERIFIERS)
def test_monte_carlo(name):
    """20,000 seeded steps of `verify` against the target, Pearson's chi-square.

    9 streams, 8 degrees of freedom: P(chi-square > 42.7) = 1e-6 for a correct verifier.
    """
    instance = Instance(7, 3, 1, "dense")
    rng = random.Random(12)
    batch, num_batches = 100, 200
    streams = [RandomStream(11)] * batch
    sampled = [SamplingParams(temperature=1.0)] * batch
    counts: dict[Context, int] = defaultdict(int)
    verifier = VERIFIERS[name]()
    for _ in range(num_batches):
        drafted = rng.choices(range(3), instance.draft[()], k=batch)
        logits = torch.stack([instance.rows(instance.target, (t,), 2).log() for t in drafted])
        draft = torch.tensor(instance.draft[()]).expand(batch, 1, 3)
        proposal = Proposal(torch.tensor(drafted)[:, None], (1,) * batch, draft)
        verdict = verifier.verify(logits.float(), proposal, sampled, streams)
        for t, n, following in zip(drafted, verdict.num_accepted, verdict.next_token, strict=True):
            stream = (t, following) if n else (following,)
            while len(stream) < 2:
                stream += tuple(rng.choices(range(3), instance.target[stream]))
            counts[stream] += 1
    chi_square = 0.0
    for stream in itertools.product(range(3), repeat=2):
        expected = (
            batch
            * num_batches
            * instance.target[()][stream[0]]
            * instance.target[stream[:1]][stream[1]]
        )
        assert expected > 5, "too rare for the chi-square approximation"
        chi_square += (counts[stream] - expected) ** 2 / expected
    assert chi_square < 42.7
