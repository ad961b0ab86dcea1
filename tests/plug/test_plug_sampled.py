"""Sampled `generate` of a model with a plug: the law of transformers' own, one seed for a call."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
from exact_laws import chi_square
from fake_drafters import SkewedDrafter
from plug_models import prompts, tiny_model
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hybrid.plug import attach
from hybrid.protocols import DraftState
from hybrid.types import Plan, Proposal

VOCAB, NEW = 6, 3
PROMPT = torch.tensor([[5, 2, 1, 4, 2, 1]])


class NoEcho(LogitsProcessor):
    """Somebody's own: the last token makes its successor likelier."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.scatter_add(1, (input_ids[:, -1:] + 1) % VOCAB, torch.ones(len(scores), 1))


OPTIONS: dict[str, Any] = {
    "do_sample": True,
    "temperature": 1.5,
    "top_k": 5,
    "top_p": 0.9,
    "repetition_penalty": 1.1,
    "max_new_tokens": NEW,
}


def law_of(model: PreTrainedModel) -> dict[tuple[int, ...], float]:
    """Return the odds of every answer by the model's own forward and transformers' processors."""
    processors = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.1),
            NoEcho(),
            TemperatureLogitsWarper(1.5),
            TopKLogitsWarper(5),
            TopPLogitsWarper(0.9),
        ]
    )
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(NEW):
        longer = {}
        for answer, mass in law.items():
            ids = torch.cat([PROMPT, torch.tensor([answer], dtype=torch.long)], dim=1)
            with torch.no_grad():
                scores = processors(ids, model(ids).logits[:, -1])
            odds = scores[0].double().softmax(dim=-1).tolist()
            longer.update({(*answer, t): mass * p for t, p in enumerate(odds) if p > 0})
        law = longer
    return law


def highest(num_cells: int) -> float:
    """Return what a right law's statistic exceeds with odds 1e-4 (Wilson and Hilferty, 1931)."""
    freedom, quantile = num_cells - 1, 3.719
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + quantile * math.sqrt(spread)) ** 3


@pytest.mark.parametrize("drafter", ["ngram", SkewedDrafter(VOCAB)], ids=["copied", "drawn"])
def test_answers_follow_the_law_of_transformers(drafter: Any) -> None:
    model, batch, calls = tiny_model(vocab_size=VOCAB), 30, 20
    law = law_of(model)
    plug = attach(model, drafter=drafter, num_draft_tokens=2)
    seen: Counter[tuple[int, ...]] = Counter()
    torch.manual_seed(0)
    drafted = accepted = 0
    for _ in range(calls):
        out = model.generate(
            PROMPT, **OPTIONS, logits_processor=[NoEcho()], num_return_sequences=batch
        )
        seen.update(tuple(row) for row in out[:, PROMPT.shape[1] :].tolist())
        drafted += sum(row.num_drafted for row in plug.stats)
        accepted += sum(row.num_accepted for row in plug.stats)
    assert drafted > accepted > 5
    assert set(seen) <= set(law)
    statistic, num_cells = chi_square(seen, law, batch * calls)
    assert num_cells > 20
    assert statistic < highest(num_cells)


def test_torch_s_seed_decides() -> None:
    model, inputs = tiny_model(), prompts(3)
    options = {"do_sample": True, "max_new_tokens": 12, "num_return_sequences": 2}
    attach(model, drafter="ngram")
    answers = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        answers.append(model.generate(**inputs, **options)[:, -12:])
    assert torch.equal(answers[0], answers[1])
    assert not torch.equal(answers[0], answers[2])
    rows = [answers[0][i] for i in range(6)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(rows, 2))


def test_drafts_are_drawn_as_the_call_is() -> None:
    """The law would be right with any: drafts that follow it are accepted more often."""
    model, seen = tiny_model(vocab_size=VOCAB), []

    class Curious(SkewedDrafter):
        def draft(self, state: DraftState, plan: Plan) -> Proposal:
            seen.extend(row.sampling for row in state.rows)
            return super().draft(state, plan)

    attach(model, drafter=Curious(VOCAB))
    model.generate(PROMPT, **OPTIONS)
    model.generate(PROMPT, max_new_tokens=NEW, do_sample=False)
    for name in ("temperature", "top_k", "top_p", "repetition_penalty"):
        assert getattr(seen[0], name) == OPTIONS[name]
    assert seen[-1].is_greedy


def test_a_sampled_row_without_processors_is_a_draw_from_the_logits() -> None:
    model = tiny_model(vocab_size=VOCAB)
    attach(model, drafter="ngram")
    torch.manual_seed(3)
    out = model.generate(
        PROMPT, do_sample=True, top_k=0, max_new_tokens=1, num_return_sequences=500
    )
    with torch.no_grad():
        odds = model(PROMPT).logits[0, -1].double().softmax(dim=-1)
    law = {(t,): p for t, p in enumerate(odds.tolist())}
    statistic, num_cells = chi_square(Counter((t,) for t in out[:, -1].tolist()), law, 500)
    assert num_cells > 3
    assert statistic < highest(num_cells)
