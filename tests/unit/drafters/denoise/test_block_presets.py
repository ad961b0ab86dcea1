"""Each preset with a causal context against its slow twin, alone and in a batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import block_twins as twins
import pytest
from block_twins import MASK, cut, decode, model

from hybrid.drafters.denoise.block_presets import (
    D2F,
    SDAR,
    FastDLLMv2,
    LLaDA2,
    LLaDA21,
    Nemotron,
)
from hybrid.errors import ConfigError

DYNAMIC = {"block_size": 4, "steps": 4, "threshold": 0.3}
EDITS = {"threshold": 0.3, "edit_threshold": 0.3, "max_post_steps": 3, "num_to_transfer": 1}
PIPELINE = {
    "confidence_threshold": 0.3,
    "block_add_threshold": 0.1,
    "block_activate_threshold": 0.9,
}


def llada2(backbone: Any, prompt: list[int], limit: int, *, steps: int, **fields: Any) -> Any:
    """Run the twin with the steps that LLaDA2 takes: as many as tokens are wanted, at most."""
    return twins.sdar(backbone, prompt, limit, steps=min(steps, limit), **fields)


# preset, twin, shift of the model's logits, parameters of both
SYSTEMS: dict[str, tuple[Any, Callable[..., twins.Answer], int, dict[str, Any]]] = {
    "sdar": (SDAR, twins.sdar, 0, DYNAMIC),
    "sdar-quota-3-3-2": (SDAR, twins.sdar, 0, {**DYNAMIC, "block_size": 8, "steps": 3}),
    "sdar-more-steps-than-slots": (SDAR, twins.sdar, 0, {**DYNAMIC, "steps": 9}),
    "sdar-shifted": (SDAR, twins.sdar, 1, DYNAMIC),
    "sdar-static": (SDAR, twins.sdar, 0, {**DYNAMIC, "strategy": "low_confidence_static"}),
    "sdar-sequential": (SDAR, twins.sdar, 0, {**DYNAMIC, "steps": 2, "strategy": "sequential"}),
    "llada2": (LLaDA2, llada2, 0, {"block_size": 8, "steps": 8, "threshold": 0.3}),
    "llada2-one-step": (LLaDA2, llada2, 0, {"block_size": 8, "steps": 1, "threshold": 0.9}),
    "llada2.1": (LLaDA21, twins.llada21, 0, {"block_size": 4, **EDITS}),
    "llada2.1-shifted": (LLaDA21, twins.llada21, 1, {"block_size": 4, **EDITS}),
    "llada2.1-no-post": (
        LLaDA21,
        twins.llada21,
        0,
        {"block_size": 8, **EDITS, "max_post_steps": 0},
    ),
    "llada2.1-many": (
        LLaDA21,
        twins.llada21,
        0,
        {"block_size": 8, **EDITS, "edit_threshold": 0.0, "num_to_transfer": 3},
    ),
    "d2f": (D2F, twins.d2f, 0, {"block_size": 4, **PIPELINE}),
    "d2f-shifted": (D2F, twins.d2f, 1, {"block_size": 4, **PIPELINE}),
    "d2f-ar": (D2F, twins.d2f, 1, {"block_size": 1, **PIPELINE}),
    "d2f-one-by-one": (D2F, twins.d2f, 1, {"block_size": 4, **PIPELINE, "block_add_threshold": 1}),
    "d2f-all-at-once": (
        D2F,
        twins.d2f,
        1,
        {"block_size": 3, **PIPELINE, "block_add_threshold": 0, "block_activate_threshold": 0.3},
    ),
    "fast-dllm-v2": (
        FastDLLMv2,
        twins.fast_dllm_v2,
        1,
        {"block_size": 8, "sub_block_size": 4, "threshold": 0.3},
    ),
    "fast-dllm-v2-one-by-one": (
        FastDLLMv2,
        twins.fast_dllm_v2,
        1,
        {"block_size": 4, "sub_block_size": 2, "threshold": 1.0},
    ),
    "nemotron": (Nemotron, twins.nemotron, 0, {"block_size": 4, "threshold": 0.3}),
    "nemotron-quota": (Nemotron, twins.nemotron, 0, {"block_size": 8, "threshold": None}),
    "nemotron-ar": (Nemotron, twins.nemotron, 0, {"block_size": 1, "threshold": 0.5}),
}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Return a prompt that may hold the mask token."""
    draw = random.Random(100 * length + seed)
    return [draw.choice([MASK, *range(20)]) for _ in range(length)]


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize(("num_prompt", "limit"), [(1, 1), (3, 9), (4, 8), (8, 16), (11, 13)])
def test_tokens_and_passes_are_the_twins(name: str, num_prompt: int, limit: int) -> None:
    preset, twin, shift, parameters = SYSTEMS[name]
    backbone, prompt = model(shift), prompt_of(num_prompt)
    expected, calls = twin(backbone, prompt, limit, **parameters)
    (tokens,), (passes,) = decode(backbone, preset(**parameters), [prompt], limit)
    assert tokens == expected[:limit]
    assert passes <= calls
    if len(expected) == limit:  # no pass was saved by cutting the last block
        assert passes == calls


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", SYSTEMS)
def test_a_batch_is_its_rows_alone(name: str, temperature: float) -> None:
    preset, _, shift, parameters = SYSTEMS[name]
    backbone, prompts = model(shift), [prompt_of(n) for n in (1, 8, 5, 9, 8)]
    asked = {"limit": 11, "temperature": temperature}
    tokens, passes = decode(backbone, preset(**parameters), prompts, **asked)
    for prompt, own, count in zip(prompts, tokens, passes, strict=True):
        assert ([own], [count]) == decode(backbone, preset(**parameters), [prompt], **asked)


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_row_ends_with_its_first_eos(name: str) -> None:
    preset, twin, shift, parameters = SYSTEMS[name]
    prompts = [prompt_of(n, seed=1) for n in (2, 4, 7)]
    answers = [twin(model(shift), p, 12, **parameters)[0] for p in prompts]
    backbone = model(shift, eos_token_ids=(answers[0][3], answers[1][0], answers[2][8]))
    tokens, _ = decode(backbone, preset(**parameters), prompts, 12)
    assert tokens == [cut(answer, 12, backbone.eos_token_ids) for answer in answers]
    for prompt, own in zip(prompts, tokens, strict=True):  # the twin of D2F heeds EOS itself
        whole, _ = twin(backbone, prompt, 12, **parameters)
        assert own == cut(whole, 12, backbone.eos_token_ids)


@pytest.mark.parametrize("name", [name for name in SYSTEMS if name != "llada2"])
def test_the_limit_only_cuts(name: str) -> None:
    preset, _, shift, parameters = SYSTEMS[name]
    backbone, prompt = model(shift), prompt_of(6)
    (longest,), _ = decode(backbone, preset(**parameters), [prompt], 14)
    for limit in (1, 2, 5, 8, 13):
        (tokens,), _ = decode(backbone, preset(**parameters), [prompt], limit)
        assert tokens == longest[:limit]


def test_llada2_caps_its_steps_by_what_a_step_must_commit() -> None:
    backbone, prompt = model(), prompt_of(4)
    for limit, min_commit, steps in ((12, 4, 3), (12, 1, 8), (3, 8, 1)):
        preset = LLaDA2(block_size=8, steps=8, threshold=0.99, min_commit=min_commit)
        expected, calls = twins.sdar(
            backbone, prompt, limit, block_size=8, steps=steps, threshold=0.99
        )
        (tokens,), (passes,) = decode(backbone, preset, [prompt], limit)
        assert tokens == expected[:limit]
        assert passes <= calls


def test_llada21_without_edits_is_llada2() -> None:
    backbone, prompt = model(), prompt_of(5)
    plain = LLaDA2(block_size=8, steps=8, threshold=0.5)
    edited = LLaDA21(block_size=8, threshold=0.5, edit_threshold=1.1, max_post_steps=16)
    (tokens,), (passes,) = decode(backbone, plain, [prompt], 19)
    (same,), (more,) = decode(backbone, edited, [prompt], 19)
    assert same == tokens
    assert more == passes + 3  # each block ends with a pass that finds nothing to replace


def test_llada21_hands_tokens_out_when_they_can_no_longer_change() -> None:
    backbone, prompt = model(), prompt_of(4)
    rows, cache = twins.start(backbone, LLaDA21(block_size=8, **EDITS), [prompt], 12)
    seen: dict[int, set[int]] = {}
    lengths = []
    for record in twins.denoise(backbone, cache, rows, view=True):
        (row,) = record.rows
        lengths.append(len(row.tokens))
        for slot in row.slots:
            if slot.token is not None and slot.position >= 4:
                seen.setdefault(slot.position, set()).add(slot.token)
    assert any(len(tokens) > 1 for tokens in seen.values())
    assert [n for n in lengths if n] == [4, 8]


def test_entropy_bounded_commits_all_at_once_or_one_by_one() -> None:
    """SDAR's own rule crashes; it is that of EB-Sampler, with the quota at least."""
    backbone, prompt = model(), prompt_of(8)
    parameters = {"strategy": "entropy_bounded", "block_size": 4, "steps": 2}
    for threshold, num_passes in ((1e9, 2), (0.0, 4)):
        preset = SDAR(threshold=threshold, **parameters)
        assert decode(backbone, preset, [prompt], 8)[1] == [num_passes]


def test_block_size_is_the_models_where_none_is_given() -> None:
    backbone, prompt = model(block_size=8), prompt_of(3)
    assert decode(backbone, SDAR(), [prompt], 9) == decode(
        backbone, SDAR(block_size=8, steps=8, threshold=0.85), [prompt], 9
    )
    assert SDAR().start(model(block_size=None), 3, 2).schedule.length == 8
    shifted = model(1, block_size=16)
    assert FastDLLMv2().start(shifted, 3, 2).schedule.length == 16


def test_sub_blocks_must_divide_the_block() -> None:
    with pytest.raises(ConfigError, match="sub_block_size: got 6, expected a divisor"):
        FastDLLMv2(block_size=8, sub_block_size=6).start(model(1), 3, 8)


@pytest.mark.parametrize(
    "wrong", [{"block_size": 0}, {"strategy": "random"}, {"threshold": -1}, {"block_length": 4}]
)
def test_sdar_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SDAR(**wrong)
