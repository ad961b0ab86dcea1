"""Scores against the obvious twin: one pass over the whole text, from scratch."""

from __future__ import annotations

import pytest
from fakes import random_prompts, tiny_backbone

from hybrid.decode.reference import reference_greedy, reference_logits
from hybrid.lm_eval.scoring import log_likelihoods
from hybrid.models.transformer import NativeBackbone


def twin(backbone: NativeBackbone, context: list[int], tokens: list[int]) -> float:
    """The sum of log-probabilities of `tokens` behind `context`."""
    log_probs = reference_logits(backbone, context + tokens).log_softmax(dim=-1)
    return sum(float(log_probs[len(context) + i - 1, token]) for i, token in enumerate(tokens))


@pytest.mark.parametrize("chunk", [1, 3, 512])
@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_scores_are_those_of_one_pass(
    family: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = tiny_backbone(family)
    monkeypatch.setattr(backbone, "prefill_chunk", chunk)
    context, *continuations = random_prompts(10, 1, 7, 4, 8, seed=chunk)
    wanted = [twin(backbone, context, tokens) for tokens in continuations]
    got = log_likelihoods(backbone, context, continuations)
    assert [value for value, _ in got] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("chunk", [3, 512])
def test_what_greedy_decoding_writes_is_greedy(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = tiny_backbone()
    monkeypatch.setattr(backbone, "prefill_chunk", chunk)
    (context,) = random_prompts(6)
    written = reference_greedy(backbone, context, 8)
    others = [[*written[:i], written[i] ^ 1, *written[i + 1 :]] for i in range(len(written))]
    scores = log_likelihoods(backbone, context, [written, *others, written[:1]])
    assert [is_greedy for _, is_greedy in scores] == [True, *(False for _ in others), True]


def test_nothing_is_certain() -> None:
    assert log_likelihoods(tiny_backbone(), [1, 2], [[]]) == [(0.0, True)]
