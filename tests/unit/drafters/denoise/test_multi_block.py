"""d3LLM: when blocks open, what an EOS ends, and a slow twin of the whole loop."""

from __future__ import annotations

import math

import pytest
import torch
from block_twins import MASK, cut, decode, model
from dense_twins import Whole

from hybrid.decode.canvas import Block, Canvas
from hybrid.decode.slots import Slots
from hybrid.drafters.denoise import rules
from hybrid.drafters.denoise.caches import DelayedCache
from hybrid.drafters.denoise.multi_block import MultiBlock, SurestAlways
from hybrid.drafters.denoise.presets import D3LLM
from hybrid.drafters.denoise.rules import Unmask
from hybrid.params import SamplingParams
from hybrid.streams import RandomStream


def fill(canvas: Canvas, *positions: int, token: int = 1) -> None:
    canvas.commit(torch.tensor(positions), torch.full((len(positions),), token))


def test_a_block_opens_when_enough_of_the_last_one_is_known_one_per_pass() -> None:
    schedule, canvas = MultiBlock(3, 10, 4, add_threshold=0.5), Canvas([5, 6, 7], 13, 0)
    assert schedule.length == 13
    assert schedule.open(canvas) == [Block(3, 7, 1)]
    fill(canvas, 4)
    assert schedule.open(canvas) == [Block(3, 7, 1)]
    fill(canvas, 6)  # one half of it: the threshold itself
    assert schedule.open(canvas) == [Block(3, 7, 1), Block(7, 11, 0)]
    fill(canvas, 7, 8, 9, 10)
    # The second block is finished, the first is not, and the last is shorter.
    assert schedule.open(canvas) == [Block(3, 7, 1), Block(11, 13, 0)]
    assert schedule.stable_end(canvas) == 3
    fill(canvas, 3, 5)
    assert schedule.stable_end(canvas) == 11
    assert schedule.open(canvas) == [Block(11, 13, 1)]
    fill(canvas, 11, 12)
    assert not schedule.open(canvas)


@pytest.mark.parametrize(("threshold", "opened"), [(0.0, 2), (1.0, 1)])
def test_extreme_thresholds(threshold: float, opened: int) -> None:
    schedule, canvas = MultiBlock(1, 8, 4, threshold), Canvas([5], 9, 0)
    assert len(schedule.open(canvas)) == opened


def test_an_answer_of_one_token() -> None:
    schedule, canvas = MultiBlock(2, 1, 32, 0.1), Canvas([5, 6], 3, 0)
    assert schedule.open(canvas) == [Block(2, 3, 1)]
    fill(canvas, 2)
    assert not schedule.open(canvas)


def test_what_is_behind_the_first_eos_is_filled_with_it() -> None:
    # The prompt holds the mask id and both EOS ids; they mean nothing there.
    prompt = [0, 9, 8]
    schedule, canvas = MultiBlock(3, 8, 4, 0.1, eos_token_ids=(8, 9)), Canvas(prompt, 11, 0)
    fill(canvas, 4)
    assert schedule.open(canvas) == [Block(3, 7, 1), Block(7, 11, 0)]
    fill(canvas, 8, token=9)
    assert schedule.open(canvas) == [Block(3, 7, 1), Block(7, 11, 0)]
    assert canvas.tokens.tolist() == [*prompt, 0, 1, 0, 0, 0, 9, 8, 8]
    assert canvas.masked.nonzero()[:, 0].tolist() == [3, 5, 6, 7]
    fill(canvas, 5, token=8)  # an earlier one
    assert schedule.open(canvas) == [Block(3, 7, 1)]
    assert canvas.tokens.tolist() == [*prompt, 0, 1, 8, 8, 8, 8, 8, 8]


def test_a_masked_slot_is_no_eos_whatever_its_id() -> None:
    schedule, canvas = MultiBlock(1, 4, 4, 0.1, eos_token_ids=(0,)), Canvas([5], 5, 0)
    assert schedule.open(canvas) == [Block(1, 5, 1)]
    assert canvas.num_masked(0, 5) == 4


def test_without_early_stop_an_eos_is_a_token() -> None:
    schedule, canvas = MultiBlock(1, 4, 4, 0.1), Canvas([5], 5, 0)
    fill(canvas, 1, token=9)
    assert schedule.open(canvas) == [Block(1, 5, 1)]
    assert canvas.num_masked(0, 5) == 3


def slots(*probabilities: float) -> Slots:
    """Return predictions for positions 2, 3, ...: token 0 with these probabilities, else 1."""
    logits = torch.tensor([[p, 1 - p] for p in probabilities]).log()
    size = len(probabilities)
    return Slots(
        logits,
        torch.arange(2, 2 + size),
        masked=torch.ones(size, dtype=torch.bool),
        current=torch.zeros(size, dtype=torch.long),
        sampling=SamplingParams(temperature=0),
        stream=RandomStream(0),
    )


@pytest.mark.parametrize(("shift", "expected"), [(0, [0, 1]), (1, [0])])
def test_an_entropy_equal_to_the_threshold(shift: int, expected: list[int]) -> None:
    said = slots(0.9, 0.75, 0.6)
    threshold = float(said.entropy[1])
    assert threshold == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    rule = D3LLM(entropy_threshold=threshold).start(model(shift), 2, 3).rule
    assert rule.choose(said, [Block(2, 5, 1)]).tolist() == expected


def test_the_surest_slot_of_all_blocks_beside_the_first_blocks_own() -> None:
    blocks = [Block(2, 4, 1), Block(4, 6, 0)]
    never = SurestAlways(Unmask(rules.certainty, -0.0))
    assert never.choose(slots(0.6, 0.7, 0.8, 0.9), blocks).tolist() == [1, 3]
    assert never.choose(slots(0.6, 0.9, 0.8, 0.7), blocks).tolist() == [1]
    some = SurestAlways(Unmask(rules.certainty, -0.52))  # 0.8 has 0.500 nats, 0.75 has 0.562
    assert some.choose(slots(0.6, 0.8, 0.8, 0.7), blocks).tolist() == [1, 2]


def twin(text: Whole, preset: D3LLM, size: int, shift: int, eos: int | None) -> int:
    """Run d3LLM as published, activation included; return the number of passes."""
    first, length = text.num_prompt, len(text.tokens)
    blocks = [(0, first, True)]
    passes = 0

    def progress(block: tuple[int, int, bool]) -> float:
        start, end, _ = block
        return 1 - len(text.slots(start, end)) / (end - start)

    def add() -> None:
        start = blocks[-1][1]
        is_active = progress(blocks[-1]) >= preset.block_activate_threshold
        blocks.append((start, min(start + size, length), is_active))

    add()
    while True:
        ends = [i for i in range(first, length) if not text.masked[i] and text.tokens[i] == eos]
        for i in range(ends[0] + 1 if ends else length, length):
            text.put(i, text.tokens[ends[0]])
        if not text.slots(0, length):
            return passes
        for i in range(1, len(blocks)):
            start, end, is_active = blocks[i]
            is_active |= progress(blocks[i - 1]) >= preset.block_activate_threshold
            blocks[i] = start, end, is_active
        if blocks[-1][1] < length and progress(blocks[-1]) >= preset.block_add_threshold:
            add()
        said = text.laws()
        passes += 1
        best = {i: law.argmax().item() for i, law in enumerate(said)}
        entropy = {
            i: -sum(p * math.log(p) for p in law.tolist() if p) for i, law in enumerate(said)
        }
        slots = text.slots(first, blocks[-1][1])
        limit = preset.entropy_threshold
        chosen = {i for i in slots if (entropy[i] < limit if shift else entropy[i] <= limit)}
        if not shift:
            chosen.add(min(slots, key=entropy.__getitem__))
        start, end, _ = next(b for b in blocks[1:] if b[2] and text.slots(*b[:2]))
        if not chosen & set(range(start, end)):
            chosen.add(min(text.slots(start, end), key=entropy.__getitem__))
        for i in chosen:
            text.put(i, int(best[i]))


TWINS = [
    (0.6, 0.1, 0.95, 5, 17),
    (1.2, 0.3, 0.0, 4, 9),
    (1.6, 0.5, 1.0, 3, 12),
    (0.0, 1.0, 1.0, 4, 8),
    (2.5, 0.0, 0.5, 16, 10),
]


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(("entropy", "add", "activate", "size", "new"), TWINS)
def test_twin(entropy: float, add: float, activate: float, size: int, new: int, shift: int) -> None:
    backbone = model(shift)
    preset = D3LLM(
        block_size=size,
        entropy_threshold=entropy,
        block_add_threshold=add,
        block_activate_threshold=activate,
        early_stop=False,
    )
    for prompt in ([3], [1, MASK, 2, 7, 5]):
        text = Whole(backbone, prompt, len(prompt) + new)
        passes = twin(text, preset, size, shift, None)
        expected = text.tokens[len(prompt) :]
        assert decode(backbone, preset, [prompt], new, ignore_eos=True) == ([expected], [passes])


@pytest.mark.parametrize("shift", [0, 1])
def test_twin_with_early_stop(shift: int) -> None:
    preset = D3LLM(block_size=4, entropy_threshold=1.2, block_add_threshold=0.3)
    prompt, new, ended = [1, 2, 7, 5], 14, 0
    plain, _ = decode(model(shift), preset, [prompt], new)
    for eos in sorted(set(plain[0])):
        backbone = model(shift, eos_token_ids=(eos,))
        text = Whole(backbone, prompt, len(prompt) + new)
        passes = twin(text, preset, 4, shift, eos)
        expected = text.tokens[len(prompt) :]
        assert decode(backbone, preset, [prompt], new) == ([cut(expected, new, (eos,))], [passes])
        # Asked to go on, it hands out what the answer was filled with.
        assert decode(backbone, preset, [prompt], new, ignore_eos=True) == ([expected], [passes])
        ended += eos in expected[:-1]
    assert ended


def test_what_the_delayed_cache_feeds() -> None:
    cache, canvas = DelayedCache(2, 0, delay=1, refresh_interval=100), Canvas([5, 6], 10, 0)

    def step(*blocks: Block) -> tuple[int, int, int]:
        plan = cache.plan(canvas, blocks)
        assert plan.positions.tolist() == list(range(plan.prefix, 10))
        assert plan.positions[plan.rows].tolist() == plan.targets.tolist()
        return plan.prefix, plan.num_kept, len(plan.targets)

    first, second = Block(2, 6), Block(6, 10, 0)
    assert step(first) == (0, 2, 4)  # the prompt is cached
    assert step(first) == (2, 0, 4)
    fill(canvas, 2, 3, 4, 5, 6)
    assert step(second) == (0, 2, 3)  # a finished block waits: everything is renewed
    assert step(second) == (2, 4, 3)  # it is cached, what was cached stays
    assert step(second) == (6, 0, 3)


def test_the_delayed_cache_is_renewed_and_keeps_the_predecessor_of_a_slot_out() -> None:
    cache, canvas = DelayedCache(3, 1, delay=2, refresh_interval=3), Canvas([5, 6, 7], 7, 0)
    seen = []
    for _ in range(6):
        plan = cache.plan(canvas, [Block(3, 7)])
        assert plan.positions[plan.rows].tolist() == [2, 3, 4, 5]
        seen.append((plan.prefix, plan.num_kept))
    assert seen == [(0, 0), (0, 2), (0, 2), (2, 0), (2, 0), (0, 2)]


DELAYED = {"block_size": 4, "entropy_threshold": 1.2, "early_stop": False, "cache": "delayed"}


@pytest.mark.parametrize("shift", [0, 1])
def test_a_cache_that_never_holds_anything_old_is_no_cache(shift: int) -> None:
    backbone, prompts = model(shift), [[1, 2, 7, 5], [4], [9, MASK, 3, 3, 8, 1]]
    expected = decode(backbone, D3LLM(**{**DELAYED, "cache": "none"}), prompts, 14, ignore_eos=True)
    for changes in ({"cache_delay": 10**6}, {"refresh_interval": 1}):
        preset = D3LLM(**DELAYED, **changes)
        assert decode(backbone, preset, prompts, 14, ignore_eos=True) == expected


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(("delay", "interval"), [(0, 100), (1, 4), (3, 100)])
def test_delayed_rows_alone_and_together(shift: int, delay: int, interval: int) -> None:
    backbone, prompts = model(shift), [[1, 2, 7, 5], [4], [9, MASK, 3, 3, 8, 1]]
    preset = D3LLM(**DELAYED, cache_delay=delay, refresh_interval=interval)
    together = decode(backbone, preset, prompts, 14, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        answers, passes = decode(backbone, preset, [prompt], 14, ignore_eos=True)
        assert (answers[0], passes[0]) == (together[0][i], together[1][i])
        assert MASK not in answers[0]
