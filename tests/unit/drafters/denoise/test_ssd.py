"""SSD gives the tokens of one pass per slot, greedy and sampled, in fewer passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from block_twins import MASK, cut, model, start
from fakes import random_prompts

from hybrid.attention.pattern import full_sequence
from hybrid.decode.canvas import Block, Canvas
from hybrid.decode.denoise import denoise
from hybrid.decode.policies import DenoisePreset
from hybrid.decode.slots import Slots
from hybrid.drafters.denoise.caches import NoCache
from hybrid.drafters.denoise.presets import LLaDA
from hybrid.drafters.denoise.ssd import SSD, SelfSpeculation
from hybrid.errors import ConfigError
from hybrid.params import SamplingParams
from hybrid.streams import RandomStream

PROMPTS = random_prompts(9, 1, 4, vocab_size=20)
LIMIT = 12


def run(
    preset: DenoisePreset, prompts: Sequence[list[int]], *, limit: int = LIMIT, **sampling: Any
) -> tuple[list[list[int]], list[int]]:
    """Return each row's answer and number of passes; the cache has a row for each guess."""
    backbone = sampling.pop("backbone", None) or model()
    rows, _ = start(backbone, preset, prompts, limit, **{"ignore_eos": True, **sampling})
    length = max(len(row.canvas) for row in rows)
    cache = backbone.new_cache(len(rows) * rows[0].denoiser.copies, length)
    passes = [0] * len(rows)
    for record in denoise(backbone, cache, rows):
        for step in record.rows:
            passes[step.index] += record.width > 0
    return [row.state.tokens[len(p) :] for row, p in zip(rows, prompts, strict=True)], passes


def one_by_one(backbone: Any, prompt: list[int], limit: int, size: int) -> list[int]:
    """Return what one slot per pass gives, the most confident of the first open block."""
    tokens, masked = [*prompt, *[MASK] * limit], set(range(len(prompt), len(prompt) + limit))
    while masked:
        first = len(prompt) + (min(masked) - len(prompt)) // size * size
        out = backbone.forward(
            torch.tensor([tokens]),
            torch.arange(len(tokens))[None],
            full_sequence(1, len(tokens)),
            backbone.new_cache(1, len(tokens)),
            [0],
        )
        logits = out.logits[0].clone()
        logits[:, MASK] = float("-inf")
        best, ids = logits.softmax(-1).max(-1)
        shift = backbone.logit_shift
        slot = max((i for i in masked if i < first + size), key=lambda i: float(best[i - shift]))
        tokens[slot] = int(ids[slot - shift])
        masked.discard(slot)
    return tokens[len(prompt) :]


TREES = [(1, 1), (2, 1), (4, 1), (4, 3), (30, 2)]


@pytest.mark.parametrize(("depth", "width"), TREES)
@pytest.mark.parametrize("size", [None, 4, 1])
def test_the_tokens_are_those_of_llada_step_by_step(
    size: int | None, depth: int, width: int
) -> None:
    saved = 0
    for prompt in PROMPTS:
        slow, steps = run(LLaDA(steps=LIMIT, block_size=size), [prompt])
        fast, passes = run(SSD(block_size=size, depth=depth, width=width), [prompt])
        assert fast == slow
        assert steps == [LIMIT]
        assert passes[0] <= LIMIT
        saved += LIMIT - passes[0]
    # A block of one slot leaves none to guess about, nor does a chain of one state.
    assert (saved > 0) == (depth > 1 and size != 1)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("size", [5, 12])
def test_partial_blocks_and_shifted_logits(size: int, shift: int) -> None:
    backbone = model(shift)
    for prompt in PROMPTS:
        (fast,), (passes,) = run(SSD(block_size=size, width=2), [prompt], backbone=backbone)
        assert fast == one_by_one(backbone, prompt, LIMIT, size)
        assert passes < LIMIT


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampled_tokens_are_those_of_the_same_stream(temperature: float) -> None:
    """A guess decides which logits are at hand, never what is drawn from them."""
    saved = 0
    for prompt in PROMPTS:
        settings: dict[str, Any] = {"temperature": temperature}
        slow, _ = run(LLaDA(block_size=4), [prompt], **settings)
        fast, passes = run(SSD(block_size=4, width=2), [prompt], **settings)
        assert fast == slow
        saved += LIMIT - passes[0]
    assert saved > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_does_not_depend_on_the_batch(temperature: float) -> None:
    prompts = [*PROMPTS, PROMPTS[0][::-1], PROMPTS[0]]
    preset = SSD(block_size=6, depth=3, width=2)
    answers, passes = run(preset, prompts, temperature=temperature)
    for prompt, answer, count in zip(prompts, answers, passes, strict=True):
        assert run(preset, [prompt], temperature=temperature) == ([answer], [count])


def test_eos_and_answers_of_one_token() -> None:
    (answer,), _ = run(SSD(), [PROMPTS[0]])
    for eos in {answer[0], answer[4], answer[-1]}:
        ends = model(eos_token_ids=(eos,))
        (short,), _ = run(SSD(), [PROMPTS[0]], backbone=ends, ignore_eos=False)
        assert short == cut(answer, LIMIT, [eos])
    assert run(SSD(), [PROMPTS[0]], limit=1) == run(LLaDA(), [PROMPTS[0]], limit=1)


@pytest.mark.parametrize(
    ("depth", "width", "states"),
    [
        (1, 3, []),
        (2, 1, [{5}]),
        (4, 1, [{5}, {5, 3}, {5, 3, 6}]),
        (9, 1, [{5}, {5, 3}, {5, 3, 6}]),  # a fourth state would need no pass
        (3, 2, [{5}, {5, 3}, {3}]),  # both chains lead to the slots 5 and 3
        (3, 3, [{5}, {5, 3}, {3}, {6}, {6, 5}]),
        (2, 9, [{5}, {3}, {6}, {4}]),
    ],
)
def test_which_states_are_guessed_by_hand(depth: int, width: int, states: list[set[int]]) -> None:
    """Slots 2 to 6 with confidences .9, .5, .1, .8, .2: the first is chosen, four are left."""
    canvas, blocks = Canvas([7, 8], 7, MASK), [Block(2, 7)]
    both = SelfSpeculation(NoCache(0), (2, 5, 5), depth, width)
    assert both.plan(canvas, blocks).guesses == (), "nothing was predicted yet"
    slots = Slots(
        torch.eye(5, 9),
        torch.arange(2, 7),
        masked=torch.ones(5, dtype=torch.bool),
        current=torch.full((5,), MASK),
        sampling=SamplingParams(),
        stream=RandomStream(0),
    )
    slots.__dict__["confidence"] = torch.tensor([0.9, 0.5, 0.1, 0.8, 0.2])
    chosen = both.choose(slots, blocks)
    assert chosen.tolist() == [0]
    canvas.commit(torch.tensor([2]), torch.tensor([0]))
    guesses = both.plan(canvas, blocks).guesses
    assert [set(range(3, 7)) - set(g.plan.targets.tolist()) for g in guesses] == states
    for guess in guesses:
        assert guess.plan.positions.tolist() == list(range(7))
        filled = ~guess.canvas.masked & canvas.masked
        assert guess.canvas.tokens[filled].tolist() == [p - 2 for p in range(7) if filled[p]]
    assert canvas.masked.tolist() == [False] * 3 + [True] * 4, "a guess is a copy"
    denoiser = SSD(depth=depth, width=width).start(model(), 2, 5)
    assert len(guesses) <= denoiser.num_guesses
    assert denoiser.copies == 1 + denoiser.num_guesses


def test_a_guess_may_finish_a_block() -> None:
    both = SelfSpeculation(NoCache(0), (2, 4, 2), 3, 1)
    canvas = Canvas([7, 8], 6, MASK)
    both._left = torch.tensor([[3], [5]])
    canvas.commit(torch.tensor([2]), torch.tensor([1]))
    (guess,) = both.plan(canvas, [Block(2, 4)]).guesses
    assert guess.plan.targets.tolist() == [4, 5], "its pass is about the next block"


@pytest.mark.parametrize("fields", [{"depth": 0}, {"width": 0}, {"block_size": 0}])
def test_nonsense_is_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        SSD(**fields)
