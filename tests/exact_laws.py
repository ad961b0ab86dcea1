"""The law of what the decode loop commits, through every outcome of every draw."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from carrying import carrying_engine
from torch import Tensor

from hybrid.decode.loop import run
from hybrid.decode.reference import reference_logits
from hybrid.drafters import drawing
from hybrid.params import SamplingParams
from hybrid.types import Proposal, Verdict

ALMOST_ONE = 1 - 2**-53


class Choices:
    """Runs something through all outcomes of its random choices, each with its probability."""

    def __init__(self) -> None:
        self.path: list[int] = []
        self.options: list[list[tuple[int, float]]] = []
        self.at, self.probability = 0, 1.0

    def choose(self, weights: Sequence[float]) -> int:
        total = sum(weights)
        if self.at == len(self.path):
            self.path.append(0)
            self.options.append([(i, w / total) for i, w in enumerate(weights) if w > 0])
        index, share = self.options[self.at][self.path[self.at]]
        self.at, self.probability = self.at + 1, self.probability * share
        return index

    def outcomes(self, function: Callable[[], Any]) -> Iterator[tuple[float, Any]]:
        while True:
            self.at, self.probability = 0, 1.0
            result = function()
            yield self.probability, result
            while self.path and self.path[-1] + 1 == len(self.options[-1]):
                self.path.pop()
                self.options.pop()
            if not self.path:
                return
            self.path[-1] += 1


class EnumeratedVerifier:
    """A shipped accept rule whose uniform numbers are boxes to choose from, not draws."""

    name, lossless = "enumerated", True

    def __init__(self, rule: Any, choices: Choices) -> None:
        self.rule, self.choices = rule, choices
        self.known: dict[Any, list[tuple[float, tuple[int, list[float]]]]] = {}

    def verify(
        self, target_logits: Tensor, proposal: Proposal, sampling: Any, streams: Any
    ) -> Verdict:
        accepted, following = [], []
        for b, count in enumerate(proposal.num_tokens):
            target = target_logits[b, : count + 1].double().softmax(-1)
            draft = None
            if proposal.draft_probs is not None:
                draft = proposal.draft_probs[b, :count].double()
                draft = draft / draft.sum(-1, keepdim=True)
            tokens = proposal.tokens[b, :count].tolist()
            key = (*tokens, *target.flatten().tolist(), *([] if draft is None else draft.flatten()))
            key = tuple(map(float, key))
            if key not in self.known:
                self.known[key] = list(boxes(self.rule, target, draft, tokens))
            found = self.known[key]
            num_accepted, weights = found[self.choices.choose([m for m, _ in found])][1]
            accepted.append(num_accepted)
            following.append(self.choices.choose(weights))
        return Verdict(tuple(accepted), tuple(following))


def boxes(
    rule: Any, target: Tensor, draft: Tensor | None, tokens: list[int]
) -> Iterator[tuple[float, tuple[int, list[float]]]]:
    """Yield (measure, outcome) of the boxes of uniform numbers on which a rule is constant.

    tests/property/test_verifiers_exact.py checks that there are such boxes.
    """
    count, edges = len(tokens), []
    for i in range(count):
        low, high = 0.0, 1.0
        for _ in range(30):
            middle = (low + high) / 2
            us = [0.0] * i + [middle] + [ALMOST_ONE] * (count - i - 1)
            if rule(target, draft, tokens, us)[0] > i:
                low = middle
            else:
                high = middle
        edges.append(low)
    for below in itertools.product((True, False), repeat=count):
        measure, us = 1.0, []
        for is_below, edge in zip(below, edges, strict=True):
            measure *= edge if is_below else 1 - edge
            us.append(edge / 2 if is_below else (1 + edge) / 2)
        if measure > 1e-8:
            num_accepted, weights = rule(target, draft, tokens, us)
            yield measure, (num_accepted, weights.tolist())


def exact_law(target, prompt, num_tokens, first=lambda answer: None, temperature=1.0):
    """Return {answer: probability} of AR sampling, or of `first(answer)` where it gives a law."""
    law = {(): 1.0}
    for _ in range(num_tokens):
        longer = {}
        for answer, mass in law.items():
            own = first(answer)
            if own is None:
                logits = reference_logits(target, [*prompt, *answer])[-1].double()
                own = (logits / temperature).softmax(-1).tolist()
            for token, p in enumerate(own):
                longer[(*answer, token)] = mass * p
        law = longer
    return law


def chi_square(seen, law, num_runs):
    """Return Pearson's statistic and its cells: answers expected less than 5 times are one."""
    expected = {answer: num_runs * p for answer, p in law.items()}
    rare = [answer for answer, mass in expected.items() if mass < 5]
    pairs = [(seen[answer], mass) for answer, mass in expected.items() if mass >= 5]
    pairs += [(sum(seen[a] for a in rare), sum(expected[a] for a in rare))] if rare else []
    return sum((o - e) ** 2 / e for o, e in pairs), len(pairs)


def enumerated_law(target, drafter, router, rule, prompt, num_tokens, monkeypatch):
    """Return {answer: probability} of the decode loop, through every outcome of every draw."""
    choices = Choices()
    verifier = EnumeratedVerifier(rule, choices)

    def draw(processed: Tensor, laws: Tensor, *_: Any) -> Tensor:
        return torch.tensor([choices.choose(law.double().tolist()) for law in laws])

    monkeypatch.setattr(drawing, "draw", draw)
    params = SamplingParams(temperature=1.0, max_new_tokens=num_tokens)
    seen, law = Counter(), defaultdict(float)

    def once():
        engine, rows = carrying_engine(target, drafter, [prompt], params, router)
        engine.verifier = verifier
        for record in run(engine, list(rows)):
            seen.update((step.mode, step.first_slot) for step in record.rows)
        return tuple(rows[0].tokens[len(prompt) :])

    for probability, answer in choices.outcomes(once):
        law[answer] += probability
    return law, seen
