"""SlowFast: estimates and phases by hand, and a slow twin of the whole loop."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from block_twins import MASK, decode, model
from dense_twins import Whole

from hybrid.decode.canvas import Block, Canvas
from hybrid.decode.slots import Slots
from hybrid.drafters.denoise.caches import NoCache
from hybrid.drafters.denoise.cycles import Cycles
from hybrid.drafters.denoise.presets import SlowFast
from hybrid.params import SamplingParams
from hybrid.streams import RandomStream


def cycles(new: int, size: int, *, slow: int, window: int, deviation: float = 1.0) -> Cycles:
    return Cycles(
        NoCache(0),
        2,
        new,
        size,
        num_slow=slow,
        sure=0.3,
        very_sure=0.9,
        window=window,
        max_deviation=deviation,
    )


def play(rule: Cycles, canvas: Canvas, confidences: dict[int, float]) -> tuple[Block, int]:
    """Run a pass that is sure of slots as told, of others hardly; return its block and width."""
    (block,) = rule.open(canvas)
    plan = rule.plan(canvas, [block])
    assert plan.positions.tolist() == list(range(len(plan.positions)))
    assert plan.targets.tolist() == canvas.slots(block.start, block.end).tolist()
    probabilities = torch.tensor([confidences.get(int(i), 0.1) for i in plan.targets])
    # The rest is spread over 20 tokens, so that a sure token is the best from 0.05 on.
    logits = torch.full((len(probabilities), 21), 0.0)
    logits[:] = ((1 - probabilities) / 20).log()[:, None]
    logits[:, 0] = probabilities.log()
    said = Slots(
        logits,
        plan.targets,
        masked=canvas.masked[plan.targets],
        current=canvas.tokens[plan.targets],
        sampling=SamplingParams(temperature=0),
        stream=RandomStream(0),
        raw_confidence=True,
    )
    index = rule.choose(said, [block])
    canvas.commit(plan.targets[index], torch.ones_like(index))
    return block, len(plan.positions)


def test_estimates_that_agree_end_the_cycle() -> None:
    rule, canvas = cycles(12, 10, slow=3, window=2), Canvas([5, 6], 14, 0)
    assert rule.length == 14
    assert play(rule, canvas, {2: 0.8, 5: 0.31}) == (Block(2, 12), 14)  # up to 5
    assert canvas.masked.nonzero()[:, 0].tolist() == list(range(3, 14))
    assert play(rule, canvas, {5: 0.4, 3: 0.5}) == (Block(2, 12), 14)  # the same: agreed
    # What later passes of the phase see no longer counts. Two very sure slots go together.
    assert play(rule, canvas, {11: 0.9, 10: 0.95, 5: 0.6}) == (Block(2, 12), 14)
    assert canvas.masked.nonzero()[:, 0].tolist() == [4, 5, 6, 7, 8, 9, 12, 13]
    # Fast: nothing behind the cycle is committed, nor fed but in the first pass.
    assert play(rule, canvas, {4: 0.5, 8: 0.99, 9: 0.99}) == (Block(2, 6), 14)
    assert play(rule, canvas, {5: 0.2}) == (Block(2, 6), 6)
    # The next cycle begins behind it; an estimate without any sure slot is one position.
    assert play(rule, canvas, {}) == (Block(6, 12), 14)
    assert canvas.masked.nonzero()[:, 0].tolist() == [7, 8, 9, 12, 13]
    assert play(rule, canvas, {}) == (Block(6, 12), 14)
    assert play(rule, canvas, {}) == (Block(6, 12), 14)
    # The cycle [6, 7) is full already: a new one.
    assert play(rule, canvas, {9: 0.5}) == (Block(7, 12), 14)
    # The block is finished within a slow phase: the last, shorter block.
    assert play(rule, canvas, {12: 0.95, 13: 0.95}) == (Block(12, 14), 14)
    assert not rule.open(canvas)


def test_estimates_that_never_agree_are_averaged() -> None:
    # Ends 8, 4 and 9; the last two: (4 + 9) / 2 = 6.5.
    rule, canvas = cycles(10, 10, slow=3, window=2), Canvas([5, 6], 12, 0)
    for sure in ({7: 0.5}, {3: 0.5}, {8: 0.5}):
        assert play(rule, canvas, sure) == (Block(2, 12), 12)
    assert play(rule, canvas, {}) == (Block(2, 6), 12)


def test_a_window_that_the_phase_does_not_fill() -> None:
    rule, canvas = cycles(10, 10, slow=2, window=3), Canvas([5, 6], 12, 0)
    for sure in ({7: 0.5}, {10: 0.5}):  # 8 and 11
        play(rule, canvas, sure)
    assert play(rule, canvas, {}) == (Block(2, 9), 12)


@pytest.mark.parametrize(("deviation", "end"), [(1.0, 7), (1.001, 8)])
def test_a_deviation_equal_to_the_threshold_does_not_agree(deviation: float, end: int) -> None:
    rule = cycles(10, 10, slow=2, window=2, deviation=deviation)
    canvas = Canvas([5, 6], 12, 0)
    for sure in ({5: 0.5}, {7: 0.5}):  # 6 and 8: deviation 1, mean 7
        play(rule, canvas, sure)
    assert play(rule, canvas, {})[0] == Block(2, end)


def test_one_very_sure_slot_is_the_surest() -> None:
    rule, canvas = cycles(4, 4, slow=1, window=1), Canvas([5, 6], 6, 0)
    play(rule, canvas, {4: 0.95, 3: 0.85})
    assert canvas.masked.tolist() == [False, False, True, True, False, True]


def twin(text: Whole, preset: SlowFast) -> int:
    """Run SlowFast as published; return the calls that had a slot to commit."""
    calls = 0

    def confidences(end: int | None = None) -> tuple[list[int], list[float]]:
        best = text.laws(end).max(dim=-1)
        return best.indices.tolist(), best.values.tolist()

    def fill(slots: Sequence[int], tokens: list[int], sure: list[float]) -> None:
        high = [i for i in slots if sure[i] >= preset.high_confidence_threshold]
        for i in high if len(high) > 1 else [max(slots, key=sure.__getitem__)]:
            text.put(i, tokens[i])

    begin = text.num_prompt
    while begin < len(text.tokens):
        end, done = min(begin + preset.block_size, len(text.tokens)), 0
        while text.slots(begin, end):
            history: list[int] = []
            length = None
            for _ in range(preset.k_exploration_steps):
                slots = text.slots(begin + done, end)
                if not slots:  # the reference calls the model all the same
                    break
                tokens, sure = confidences()
                calls += 1
                if length is None:
                    low = preset.cycle_len_confidence_threshold
                    far = [i for i in slots if sure[i] >= low]
                    history.append(max(far) + 1 - begin if far else done + 1)
                    last = history[-preset.cycle_length_stability_window :]
                    mean = sum(last) / len(last)
                    deviation = (sum((x - mean) ** 2 for x in last) / len(last)) ** 0.5
                    if len(last) == preset.cycle_length_stability_window and (
                        deviation < preset.cycle_length_stability_std_dev_threshold
                    ):
                        length = last[-1]
                fill(slots, tokens, sure)
            length = int(mean) if length is None else length
            is_first = True
            while slots := text.slots(begin + done, begin + length):
                fill(slots, *confidences(None if is_first else begin + length))
                calls, is_first = calls + 1, False
            done = length
        begin = end
    return calls


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(
    ("size", "new", "slow", "low", "window", "deviation", "high"),
    [
        (8, 20, 3, 0.3, 2, 1.0, 0.5),
        (16, 16, 6, 0.3, 2, 1.0, 0.9),
        (5, 13, 2, 0.2, 3, 2.0, 0.4),
        (32, 9, 1, 0.1, 1, 0.5, 0.3),
        (4, 1, 4, 0.9, 2, 0.0, 0.2),
    ],
)
def test_twin(
    size: int,
    new: int,
    slow: int,
    low: float,
    window: int,
    deviation: float,
    high: float,
    shift: int,
) -> None:
    backbone = model(shift)
    preset = SlowFast(
        block_size=size,
        k_exploration_steps=slow,
        cycle_len_confidence_threshold=low,
        cycle_length_stability_window=window,
        cycle_length_stability_std_dev_threshold=deviation,
        high_confidence_threshold=high,
    )
    for prompt in ([3], [1, MASK, 2, 7, 5]):
        text = Whole(backbone, prompt, len(prompt) + new)
        calls = twin(text, preset)
        expected = [text.tokens[len(prompt) :]], [calls]
        assert decode(backbone, preset, [prompt], new, ignore_eos=True) == expected


@pytest.mark.parametrize("cache", ["none", "dllm-cache"])
def test_rows_alone_and_together(cache: str) -> None:
    backbone, prompts = model(), [[1, 2, 7, 5], [4], [9, MASK, 3, 3, 8, 1]]
    preset = SlowFast(block_size=6, k_exploration_steps=2, gen_interval_steps=3, cache=cache)
    together = decode(backbone, preset, prompts, 14, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        answers, passes = decode(backbone, preset, [prompt], 14, ignore_eos=True)
        assert (answers[0], passes[0]) == (together[0][i], together[1][i])
