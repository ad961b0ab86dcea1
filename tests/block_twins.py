"""Slow twins of the block-causal systems: plain loops, everything recomputed in every call.

They are written from the published algorithms and know no cache, no policy and no batch. Nothing
is shared with the code under test but the model. Each returns the answer, whole blocks of it, and
the number of calls that the system needs with a cache but without any sharing of passes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from fakes import tiny_backbone

from hybrid.attention.pattern import AttentionPattern
from hybrid.decode.denoise import DenoiseRow, denoise
from hybrid.decode.policies import DenoisePreset
from hybrid.decode.stopping import StopRule
from hybrid.models.transformer import NativeBackbone
from hybrid.params import SamplingParams
from hybrid.streams import RandomStream
from hybrid.types import SequenceState

MASK, VOCAB = 21, 24
Answer = tuple[list[int], int]


def model(shift: int = 0, **changes: Any) -> NativeBackbone:
    """Return a random float64 model with a mask token."""
    tiny = tiny_backbone("qwen3", torch.float64, VOCAB, mask_token_id=MASK, num_layers=2, scale=2.0)
    backbone = copy.copy(tiny)
    for name, value in {"mask_token_id": MASK, "logit_shift": shift, **changes}.items():
        setattr(backbone, name, value)
    return backbone


def start(
    backbone: NativeBackbone,
    preset: DenoisePreset,
    prompts: Sequence[Sequence[int]],
    limit: int,
    **sampling: Any,
) -> tuple[list[DenoiseRow], Any]:
    """Return the rows of a batch and their cache; a row's random stream follows its prompt."""
    params = SamplingParams(max_new_tokens=limit, **sampling)
    rows = []
    for i, prompt in enumerate(prompts):
        stream = RandomStream(sum(prompt))
        state = SequenceState(i, list(prompt), len(prompt), params, stream)
        rule = StopRule(params, backbone.eos_token_ids)
        rows.append(DenoiseRow.start(backbone, preset, state, rule))
    return rows, backbone.new_cache(len(rows), max(len(row.canvas) for row in rows))


def decode(
    backbone: NativeBackbone,
    preset: DenoisePreset,
    prompts: Sequence[Sequence[int]],
    limit: int,
    **sampling: Any,
) -> tuple[list[list[int]], list[int]]:
    """Return each row's answer and number of passes."""
    rows, cache = start(backbone, preset, prompts, limit, **sampling)
    passes = [0] * len(rows)
    for record in denoise(backbone, cache, rows):
        for row in record.rows:
            passes[row.index] += record.width > 0
    for row, prompt in zip(rows, prompts, strict=True):
        assert row.state.tokens[: len(prompt)] == list(prompt), "the prompt has changed"
    return [row.state.tokens[len(p) :] for row, p in zip(rows, prompts, strict=True)], passes


def cut(tokens: list[int], limit: int, eos: Sequence[int] = ()) -> list[int]:
    """Cut behind the first EOS, and at the limit."""
    ends = [i + 1 for i, token in enumerate(tokens) if token in eos]
    return tokens[: min([limit, *ends])]


class Text:
    """A prompt and masked slots behind it, and what the model says about them."""

    def __init__(self, backbone: NativeBackbone, prompt: Sequence[int], length: int) -> None:
        self.backbone, self.num_prompt = backbone, len(prompt)
        self.tokens = [*prompt, *[MASK] * (length - len(prompt))]
        self.masked = [i >= len(prompt) for i in range(length)]

    def slots(self, start: int, end: int) -> list[int]:
        return [i for i in range(start, end) if self.masked[i]]

    def put(self, at: int, token: int) -> None:
        self.tokens[at], self.masked[at] = token, False

    def rows(self, end: int, sees: Callable[[int, int], bool]) -> list[tuple[int, float]]:
        """Return the best token and its probability by the row of each of the first tokens."""
        mask = torch.tensor([[sees(q, k) for k in range(end)] for q in range(end)])
        out = self.backbone.forward(
            torch.tensor([self.tokens[:end]]),
            torch.arange(end)[None],
            AttentionPattern((0,), mask),
            self.backbone.new_cache(1, end),
            [0],
        )
        logits = out.logits[0].clone()
        logits[:, MASK] = float("-inf")
        best = logits.softmax(dim=1).max(dim=1)
        return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))

    def slot_rows(self, end: int, sees: Callable[[int, int], bool]) -> list[tuple[int, float]]:
        """Return the same for each slot, whatever row its prediction stands in."""
        rows = self.rows(end, sees)
        return [rows[0], *rows[:-1]] if self.backbone.logit_shift else rows


def even(count: int, steps: int) -> list[int]:
    return [count // steps + (i < count % steps) for i in range(steps)]


def ranked(at: list[int], said: list[tuple[int, float]]) -> list[int]:
    return sorted(at, key=lambda i: -said[i][1])


def sdar(
    backbone: NativeBackbone,
    prompt: list[int],
    limit: int,
    *,
    block_size: int,
    steps: int,
    threshold: float,
    strategy: str = "low_confidence_dynamic",
) -> Answer:
    """SDAR; with LLaDA2's steps and threshold that one, too. Its storing passes are not counted."""
    size, first = block_size, len(prompt) // block_size
    num_blocks = -(-(len(prompt) + limit) // size)
    text, calls = Text(backbone, prompt, num_blocks * size), 0
    for block in range(first, num_blocks):
        start, end = block * size, (block + 1) * size
        for count in even(size, steps):
            at = text.slots(start, end)
            if not at:
                break
            said = text.slot_rows(end, lambda q, k: q // size >= k // size)
            calls += 1
            best = ranked(at, said)[:count]
            sure = [i for i in at if said[i][1] > threshold]
            if strategy == "sequential":
                best = at[:count]
            elif strategy == "low_confidence_dynamic" and len(sure) >= count:
                best = sure
            for i in best:
                text.put(i, said[i][0])
    return text.tokens[len(prompt) :], calls


def llada21(
    backbone: NativeBackbone,
    prompt: list[int],
    limit: int,
    *,
    block_size: int,
    threshold: float,
    edit_threshold: float,
    max_post_steps: int,
    num_to_transfer: int,
) -> Answer:
    """LLaDA2.1."""
    size = block_size
    num_blocks = -(-(len(prompt) + limit) // size)
    text, calls = Text(backbone, prompt, num_blocks * size), 0
    for block in range(len(prompt) // size, num_blocks):
        start, end, post = block * size, (block + 1) * size, 0
        while True:
            at = text.slots(start, end)
            post += not at
            if post > max_post_steps:
                break
            said = text.slot_rows(end, lambda q, k: q // size >= k // size)
            calls += 1
            fills = [i for i in at if said[i][1] > threshold]
            if len(fills) < num_to_transfer:
                fills = ranked(at, said)[:num_to_transfer]
            edits = [
                i
                for i in range(max(start, len(prompt)), end)
                if i not in at and said[i][0] != text.tokens[i] and said[i][1] > edit_threshold
            ]
            for i in fills + edits:
                text.put(i, said[i][0])
            if not at and not edits:
                break
    return text.tokens[len(prompt) :], calls


def d2f(
    backbone: NativeBackbone,
    prompt: list[int],
    limit: int,
    *,
    block_size: int,
    confidence_threshold: float,
    block_add_threshold: float,
    block_activate_threshold: float,
) -> Answer:
    """D2F, by the states of its blocks; no block is added behind an EOS."""
    size, num_prompt = block_size, len(prompt)
    most = -(-limit // size)
    text, calls = Text(backbone, prompt, num_prompt + most * size), 0
    bounds = [(0, num_prompt)]
    complete, has_eos = [True], False

    def block_of(i: int) -> int:
        return 0 if i < num_prompt else 1 + (i - num_prompt) // size

    def progress(b: int) -> float:
        start, end = bounds[b]
        return 1 - len(text.slots(start, end)) / (end - start)

    while True:
        if len(bounds) <= most and not has_eos and progress(-1) >= block_add_threshold:
            bounds.append((bounds[-1][1], bounds[-1][1] + size))
            complete.append(False)
        for b in range(1, len(bounds)):
            complete[b] |= progress(b - 1) >= block_activate_threshold
        end = bounds[-1][1]
        if not text.slots(0, end):
            return text.tokens[num_prompt:end], calls
        said = text.slot_rows(end, lambda q, k: block_of(q) >= block_of(k))
        calls += 1
        for b in range(1, len(bounds)):
            at = text.slots(*bounds[b])
            sure = [i for i in at if said[i][1] > confidence_threshold]
            if complete[b] and not sure:
                sure = ranked(at, said)[:1]
            for i in sure:
                text.put(i, said[i][0])
                has_eos |= said[i][0] in backbone.eos_token_ids


def fast_dllm_v2(
    backbone: NativeBackbone,
    prompt: list[int],
    limit: int,
    *,
    block_size: int,
    sub_block_size: int,
    threshold: float,
) -> Answer:
    """Fast-dLLM v2 without its cache within a block."""
    size, num_prompt = block_size, len(prompt)
    num_blocks = -(-(num_prompt + limit) // size)
    text, calls = Text(backbone, prompt, num_blocks * size), 0

    def sees(q: int, k: int) -> bool:
        return q // size >= k // size

    for block in range(num_prompt // size, num_blocks):
        start, end = block * size, (block + 1) * size
        if text.masked[start]:  # the pass over the clean block in front of it
            text.put(start, text.rows(start, sees)[-1][0])
            calls += 1
        for sub in range(start, end, sub_block_size):
            while at := text.slots(sub, sub + sub_block_size):
                said = text.rows(end, sees)
                calls += 1
                sure = [i for i in at if said[i - 1][1] > threshold]
                for i in sure or [max(at, key=lambda i: said[i - 1][1])]:
                    text.put(i, said[i - 1][0])
    return text.tokens[num_prompt:], calls


def nemotron(
    backbone: NativeBackbone,
    prompt: list[int],
    limit: int,
    *,
    block_size: int,
    threshold: float | None,
) -> Answer:
    """Nemotron-Labs-Diffusion's diffusion mode, its prefill counted."""
    size, num_prompt = block_size, len(prompt)
    num_blocks = -(-limit // size)
    text, calls = Text(backbone, prompt, num_prompt + num_blocks * size), 0
    for start in range(num_prompt, len(text.tokens), size):
        text.put(start, text.rows(start, lambda q, k: q >= k)[-1][0])
        calls += 1
        end = start + size

        def sees(q: int, k: int, start: int = start) -> bool:
            return q >= k or min(q, k) >= start

        while at := text.slots(start, end):
            said = text.rows(end, sees)
            calls += 1
            sure = [] if threshold is None else [i for i in at if said[i][1] >= threshold]
            for i in sure or ranked(at, said)[:1]:
                text.put(i, said[i][0])
    return text.tokens[num_prompt:], calls
