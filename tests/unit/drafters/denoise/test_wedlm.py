"""WeDLM against plain loops that recompute everything, and its passes and scores by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from block_twins import MASK, cut, decode, model, start
from fakes import random_prompts
from torch import Tensor

from hybrid.attention.pattern import AttentionPattern
from hybrid.decode.canvas import Block, Canvas
from hybrid.decode.denoise import denoise
from hybrid.decode.slots import Slots
from hybrid.drafters.denoise.wedlm import KnownFirst, SlidingWindow, WeDLM
from hybrid.errors import ConfigError
from hybrid.params import SamplingParams
from hybrid.streams import RandomStream

PROMPTS = random_prompts(9, 1, 4, 13, vocab_size=20, seed=2)


def logits_of(backbone: Any, tokens: list[int], order: list[int]) -> Tensor:
    """Return [S, V]: each position sees those that are not behind it in `order`, no cache."""
    rank = torch.tensor(order).argsort()
    out = backbone.forward(
        torch.tensor([tokens]),
        torch.arange(len(tokens))[None],
        AttentionPattern((0,), rank[None, :] <= rank[:, None]),
        backbone.new_cache(1, len(tokens)),
        [0],
    )
    logits: Tensor = out.logits[0].clone()
    logits[:, MASK] = float("-inf")
    return logits


def twin(
    backbone: Any, prompt: list[int], limit: int, size: int, threshold: float, penalty: float
) -> tuple[list[int], int]:
    """Return the answer and the number of passes, from the algorithm's description."""
    tokens, first, calls = list(prompt), len(prompt), 0
    known = [True] * len(prompt)
    while first < len(prompt) + limit:
        while len(tokens) < first + size:
            tokens.append(MASK)
            known.append(False)
        masks = [i for i in range(len(tokens)) if not known[i]]
        order = [i for i in range(len(tokens)) if known[i]] + masks
        logits = logits_of(backbone, tokens, order)
        calls += 1
        scores = {}
        for i in masks:
            law = logits[i].float().softmax(0)
            scores[i] = -sum(float(p) * float(p.log()) for p in law if p > 0)
            scores[i] += penalty * (i - first)
        chosen = [i for i in masks if scores[i] < threshold]
        for i in chosen or [min(masks, key=lambda i: scores[i])]:
            tokens[i], known[i] = int(logits[i].argmax()), True
        while first < len(tokens) and known[first]:
            first += 1
    return tokens[len(prompt) : len(prompt) + limit], calls


SETTINGS = [
    (1, 0.4, 0.02),
    (4, 2.0, 0.05),
    (8, 0.0, 0.0),
    (16, 2.4, 0.02),
    (16, 9.0, 0.0),
    (5, 2.2, 9.0),
]


@pytest.mark.parametrize("limit", [1, 11])
@pytest.mark.parametrize(("size", "threshold", "penalty"), SETTINGS)
def test_it_is_the_published_algorithm(
    size: int, threshold: float, penalty: float, limit: int
) -> None:
    backbone = model()
    preset = WeDLM(window_size=size, entropy_threshold=threshold, position_penalty=penalty)
    for prompt in PROMPTS:
        (answer,), (passes,) = decode(backbone, preset, [prompt], limit, ignore_eos=True)
        assert (answer, passes) == twin(backbone, prompt, limit, size, threshold, penalty)
        if size == 1 or penalty == 9.0:
            assert passes == limit, "a slot per pass, from left to right"
    if threshold == 9.0:
        assert passes == -(-limit // size), "all slots of a window per pass"


def test_settings_above_are_neither_one_by_one_nor_all_at_once() -> None:
    counts = {twin(model(), p, 11, 16, 2.4, 0.02)[1] for p in PROMPTS}
    assert len(counts) > 1
    assert max(counts) < 11


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_does_not_depend_on_the_batch(temperature: float) -> None:
    backbone, preset = model(), WeDLM(window_size=6, entropy_threshold=2.0)
    settings: dict[str, Any] = {"ignore_eos": True, "temperature": temperature}
    answers, passes = decode(backbone, preset, PROMPTS, 14, **settings)
    for prompt, answer, count in zip(PROMPTS, answers, passes, strict=True):
        assert decode(backbone, preset, [prompt], 14, **settings) == ([answer], [count])


def test_the_cache_is_that_of_causal_decoding() -> None:
    """At any time it holds the K/V of a causal pass over what precedes the window."""
    backbone, prompt = model(), PROMPTS[0]
    (row,), cache = start(backbone, WeDLM(window_size=6, entropy_threshold=2.0), [prompt], 14)
    lengths = []
    for _ in denoise(backbone, cache, [row]):
        length = cache.lengths[0]
        lengths.append(length)
        if not length:  # ended
            break
        own = backbone.new_cache(1, length)
        backbone.forward(
            row.canvas.tokens[None, :length],
            torch.arange(length)[None],
            AttentionPattern((0,), torch.ones(length, length, dtype=torch.bool).tril()),
            own,
            [0],
        )
        held = cache.data[:, :, 0, :, :length]
        torch.testing.assert_close(held, own.data[:, :, 0, :, :length], rtol=1e-9, atol=1e-9)
        assert length <= row.canvas.first_masked
    assert lengths[0] == len(prompt)
    assert len(set(lengths)) > 3


def test_eos_and_a_mask_id_in_the_prompt() -> None:
    backbone, preset = model(), WeDLM(window_size=4, entropy_threshold=2.0)
    prompt = [MASK, 3, MASK, 5]
    (answer,), _ = decode(backbone, preset, [prompt], 12, ignore_eos=True)
    assert answer == twin(backbone, prompt, 12, 4, 2.0, 0.02)[0]
    assert MASK not in answer
    for eos in (answer[0], answer[5], answer[-1]):
        ends = model(eos_token_ids=(eos,))
        (short,), _ = decode(ends, preset, [prompt], 12)
        assert short == cut(answer, 12, [eos])


def test_known_tokens_are_fed_first_by_hand() -> None:
    canvas, cache, schedule = Canvas([7, 8], 9, MASK), KnownFirst(), SlidingWindow(2, 4, 4)
    assert schedule.length == 9, "a window may reach three slots beyond the answer"
    (block,) = schedule.open(canvas)
    assert block == Block(2, 6)
    plan = cache.plan(canvas, [block])
    assert plan.positions.tolist() == [0, 1, 2, 3, 4, 5]
    assert (plan.prefix, plan.num_kept, plan.is_causal) == (0, 2, True)
    canvas.commit(torch.tensor([2, 4]), torch.tensor([1, 2]))
    (block,) = schedule.open(canvas)
    assert block == Block(3, 7)
    assert schedule.stable_end(canvas) == 3
    plan = cache.plan(canvas, [block])
    assert plan.positions.tolist() == [2, 4, 3, 5, 6]
    assert (plan.prefix, plan.num_kept) == (2, 1)
    assert plan.targets.tolist() == [3, 5, 6]
    assert plan.rows.tolist() == [2, 3, 4]
    canvas.commit(torch.tensor([3, 5]), torch.tensor([1, 2]))
    assert schedule.open(canvas) == (), "the answer is complete, what lies behind it is not"


@pytest.mark.parametrize(
    ("threshold", "penalty", "chosen"),
    [
        (0.6, 0.0, [0, 3]),
        (0.5, 0.0, [0]),  # an entropy equal to the threshold does not pass
        (0.6, 0.1, [0]),  # the last slot is four positions away
        (0.0, 0.0, [0]),
    ],
)
def test_scores_by_hand(threshold: float, penalty: float, chosen: list[int]) -> None:
    slots = Slots(
        torch.zeros(4, 3),
        torch.tensor([10, 11, 12, 14]),
        masked=torch.ones(4, dtype=torch.bool),
        current=torch.full((4,), MASK),
        sampling=SamplingParams(),
        stream=RandomStream(0),
    )
    slots.__dict__["entropy"] = torch.tensor([0.25, 0.75, 1.0, 0.5])
    preset = WeDLM(entropy_threshold=threshold, position_penalty=penalty)
    rule = preset.start(model(), 10, 8).rule
    assert sorted(rule.choose(slots, [Block(10, 26)]).tolist()) == chosen
    slots.__dict__["entropy"] = torch.tensor([0.75, 0.25, 0.25, 0.5])
    rule = WeDLM(entropy_threshold=0.1, position_penalty=0.0).start(model(), 10, 8).rule
    assert rule.choose(slots, [Block(10, 26)]).tolist() == [1], "ties go to the left"


def test_the_temperature_does_not_change_which_slots_are_sure() -> None:
    denoiser = WeDLM().start(model(), 3, 5)
    assert denoiser.raw_confidence


@pytest.mark.parametrize(
    "fields", [{"window_size": 0}, {"entropy_threshold": -1}, {"position_penalty": float("inf")}]
)
def test_nonsense_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        WeDLM(**fields)
