"""Caches of models whose tokens see all others: what they feed, and slow twins of whole answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from block_twins import MASK, decode, even, model
from dense_twins import laws
from torch import Tensor

from hybrid.attention.pattern import bidirectional
from hybrid.decode.canvas import Block, Canvas
from hybrid.decode.policies import DenoisePreset
from hybrid.decode.slots import Slots
from hybrid.drafters.denoise.cached_presets import DLLMCache, EntropyCache, FreeCache
from hybrid.drafters.denoise.caches import EntropyRefresh, FeatureReuse, FrozenBlocks
from hybrid.drafters.denoise.presets import FastDLLM, LLaDA
from hybrid.params import SamplingParams
from hybrid.streams import RandomStream
from hybrid.types import Write

PROMPTS = [[1, 2, 7, 5], [4], [9, MASK, 3, 3, 8, 1]]


class TakeAll:
    """An unmask rule."""

    def choose(self, slots: Slots, blocks: Sequence[Block]) -> Tensor:
        return torch.arange(len(slots))


def said(positions: Sequence[int], *probabilities: float) -> Slots:
    """Return predictions: token 0 with these probabilities, else token 1."""
    return Slots(
        torch.tensor([[p, 1 - p] for p in probabilities]).log(),
        torch.tensor(positions),
        sampling=SamplingParams(temperature=0),
        stream=RandomStream(0),
    )


def test_entropy_decides_what_the_next_pass_is_fed() -> None:
    canvas = Canvas([5, 6], 12, 0)
    cache, first, second = EntropyRefresh(TakeAll(), 0, 0.6, 2), Block(2, 6), Block(6, 12)
    plan = cache.plan(canvas, [first])
    assert (plan.positions.tolist(), plan.num_kept, plan.prefix) == (list(range(12)), 12, 0)
    assert plan.write == Write.SCRATCH

    def commit(positions: Sequence[int], *probabilities: float) -> None:
        index = cache.choose(said(positions, *probabilities), [first])
        canvas.commit(torch.tensor(positions)[index], torch.ones_like(index))

    def fed(block: Block) -> list[int]:
        plan = cache.plan(canvas, [block])
        assert (plan.write, plan.prefix, plan.num_kept) == (Write.REFRESH, 12, 0)
        assert plan.targets.tolist() == canvas.slots(block.start, block.end).tolist()
        assert plan.positions[plan.rows].tolist() == plan.targets.tolist()
        return plan.positions.tolist()

    commit([3], 0.8)  # 0.5 nats
    assert fed(first) == [2, 3, 4, 5]
    commit([4], 0.8)
    assert fed(first) == [2, 3, 4, 5]
    commit([2], 0.8)  # 3 is no longer one of the last two
    assert fed(first) == [2, 4, 5]
    commit([5], 0.6)  # 0.67 nats
    assert cache.plan(canvas, [second]).num_kept == 12
    commit([6, 8, 10], 0.9, 0.8, 0.9)  # all that the last pass committed, and no more
    assert fed(second) == [6, 7, 8, 9, 10, 11]
    commit([7, 9, 11], 0.9, 0.8, 0.6)
    assert cache.plan(canvas, [second]).prefix == 0


def test_shifted_slots_are_fed_with_the_tokens_in_front_of_them() -> None:
    canvas, cache = Canvas([5, 6], 6, 0), EntropyRefresh(TakeAll(), 1, 9.0, 0)
    cache.plan(canvas, [Block(2, 6)])
    cache.choose(said([4], 0.8), [Block(2, 6)])
    canvas.commit(torch.tensor([4]), torch.tensor([1]))
    plan = cache.plan(canvas, [Block(2, 6)])
    assert plan.positions.tolist() == [1, 2, 3, 4, 5]
    assert plan.targets.tolist() == [2, 3, 5]
    assert plan.positions[plan.rows].tolist() == [1, 2, 4]


@pytest.mark.parametrize("shift", [0, 1])
def test_an_entropy_that_is_always_too_large_is_no_cache(shift: int) -> None:
    backbone = model(shift)
    preset = EntropyCache(block_size=6, threshold=0.4, entropy_threshold=0.0)
    whole = FastDLLM(block_size=6, threshold=0.4, cache="none")
    expected = decode(backbone, whole, PROMPTS, 14, ignore_eos=True)
    assert decode(backbone, preset, PROMPTS, 14, ignore_eos=True) == expected


@pytest.mark.parametrize("shift", [0, 1])
def test_frozen_blocks(shift: int) -> None:
    canvas, cache = Canvas([5, 6, 7], 11, 0), FrozenBlocks(shift)
    seen = []
    for start, end in ((3, 7), (3, 7), (7, 11), (7, 11)):
        plan = cache.plan(canvas, [Block(start, end)])
        assert plan.positions.tolist() == list(range(plan.prefix, 11))
        assert (plan.positions[plan.rows] + shift).tolist() == list(range(start, end))
        seen.append((plan.prefix, plan.prefix + plan.num_kept))
    ends = [(0, 7), (3, 7), (7, 11), (7, 11)]
    assert seen == [(max(0, a - shift), b - shift) for a, b in ends]


def frozen_twin(backbone: Any, prompt: list[int], new: int, size: int, steps: int) -> list[int]:
    """Run FreeCache as published: the last pass of a block leaves its K/V behind."""
    length, shift = len(prompt) + new, backbone.logit_shift
    tokens = torch.tensor([*prompt, *[MASK] * new])
    masked = torch.arange(length) >= len(prompt)
    cache, held = backbone.new_cache(1, length), 0
    starts = range(len(prompt), length, size)
    for start in starts:
        end = min(start + size, length)
        counts = [n for n in even(end - start, max(1, steps // len(starts))) if n]
        for step, count in enumerate(counts):
            out = backbone.forward(
                tokens[None, held:],
                torch.arange(held, length)[None],
                bidirectional((held,), length - held),
                cache,
                [0],
            )
            if held == 0 and start - shift > 0:  # the prompt's come from the first pass
                held = start - shift
                cache.commit(0, held)
                best = laws(out.logits[0], shift)[start:end].max(dim=-1)
            else:
                best = laws(out.logits[0], 0)[start - shift - held :].max(dim=-1)
            if step == len(counts) - 1:
                cache.commit(0, end - start)
                held = end - shift
            slots = [i for i in range(start, end) if masked[i]]
            for i in sorted(slots, key=lambda i: -best.values[i - start])[:count]:
                tokens[i], masked[i] = best.indices[i - start], False
    return tokens[len(prompt) :].tolist()


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(("size", "new", "steps"), [(4, 14, 14), (5, 10, 4), (16, 6, 3), (3, 9, 3)])
def test_frozen_twin(size: int, new: int, steps: int, shift: int) -> None:
    backbone, preset = model(shift), FreeCache(block_size=size, steps=steps)
    prompts = PROMPTS if not shift else [PROMPTS[0], PROMPTS[2]]
    expected = [frozen_twin(backbone, prompt, new, size, steps) for prompt in prompts]
    assert decode(backbone, preset, prompts, new, ignore_eos=True)[0] == expected


def test_features_are_fed_everything_and_kept_in_the_row() -> None:
    canvas, cache = Canvas([5, 6, 7], 9, 0), FeatureReuse(3, 1, 4, 2, 0.5)
    plans = [cache.plan(canvas, [Block(3, 6)]) for _ in range(2)]
    for plan in plans:
        assert plan.positions.tolist() == list(range(9))
        assert plan.positions[plan.rows].tolist() == [2, 3, 4]
    assert [(p.prefix, p.num_kept, p.write) for p in plans] == [
        (0, 9, Write.SCRATCH),
        (9, 0, Write.REFRESH),
    ]
    assert plans[0].features is plans[1].features
    assert plans[0].features is not None


@pytest.mark.parametrize("shift", [0, 1])
def test_features_that_are_always_renewed_are_no_cache(shift: int) -> None:
    backbone, always = model(shift), {"prompt_interval_steps": 1, "gen_interval_steps": 1}
    expected = decode(backbone, LLaDA(steps=7, block_size=7), PROMPTS, 14, ignore_eos=True)
    for ratio in (0.0, 0.5):
        preset = DLLMCache(steps=7, block_size=7, transfer_ratio=ratio, **always)
        assert decode(backbone, preset, PROMPTS, 14, ignore_eos=True) == expected


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(
    "preset",
    [
        DLLMCache(block_size=7, prompt_interval_steps=5, gen_interval_steps=3),
        EntropyCache(block_size=6, threshold=0.3, entropy_threshold=2.0, recent=2),
        FreeCache(block_size=5),
    ],
    ids=lambda preset: type(preset).__name__,
)
def test_rows_alone_and_together(preset: DenoisePreset, shift: int) -> None:
    backbone = model(shift)
    for new in (1, 14):
        together = decode(backbone, preset, PROMPTS, new, ignore_eos=True)
        assert all(len(answer) == new and MASK not in answer for answer in together[0])
        for i, prompt in enumerate(PROMPTS):
            answers, passes = decode(backbone, preset, [prompt], new, ignore_eos=True)
            assert (answers[0], passes[0]) == (together[0][i], together[1][i])
