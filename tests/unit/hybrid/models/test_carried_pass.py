"""Slots that ride in a target pass change no bit of it: logits, keys, values and taps."""

from __future__ import annotations

import tempfile
from functools import cache
from typing import Any

import pytest
import torch
from carrying import diffusion_backbone
from fakes import random_adapter, random_prompts, tiny_backbone
from torch import Tensor

from hybrid.attention.pattern import causal
from hybrid.drafters.self_diffusion import SelfDiffusionDrafter
from hybrid.errors import CapacityError
from hybrid.models.checkpoint import Int4Blocks, open_checkpoint
from hybrid.models.families import spec_from_config
from hybrid.models.tiny import tiny_checkpoint
from hybrid.models.transformer import NativeBackbone
from hybrid.params import SamplingParams
from hybrid.protocols import DraftState, ForwardOutput
from hybrid.types import SequenceState, Write

K = 4
LATE: dict[str, Any] = {"entry_layer": 1}
PLAIN: dict[str, Any] = {"entry_layer": 0, "mask_token_id": 9}
UNIFORM: dict[str, Any] = {"entry_layer": 0, "corruption": "uniform", "train_norms": False}
OWN: dict[str, Any] = {}
CASES: dict[str, tuple[str, torch.dtype, dict[str, Any]]] = {
    "llama-late": ("llama", torch.float32, LATE),
    "llama-uniform": ("llama", torch.float32, UNIFORM),
    "llama-plain": ("llama", torch.float32, PLAIN),
    "llama-exact": ("exact", torch.float32, LATE),
    "llama-bfloat16": ("llama", torch.bfloat16, LATE),
    "llama-int4": ("int4", torch.bfloat16, LATE),
    "qwen2-tied-biases": ("qwen2", torch.float32, LATE),
    "qwen3-norms": ("qwen3", torch.bfloat16, LATE),
    "mistral-window": ("mistral-window", torch.float32, LATE),
    "nemotron-query-scale": ("nemotron", torch.float32, OWN),
    "nemotron-bfloat16": ("nemotron", torch.bfloat16, OWN),
    "llada2-partial-rotary-moe": ("llada2", torch.float32, OWN),
}
LENGTHS = (0, 1, 15, 16, 33)  # cached tokens: none, and around the tiles of keys


@cache
def backbone_of(name: str, dtype: torch.dtype) -> NativeBackbone:
    if name in {"nemotron", "llada2"}:
        return diffusion_backbone(name, dtype)
    if name in {"int4", "exact"}:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = open_checkpoint(tiny_checkpoint(folder, vocab_size=64, tokenizer=False))
            weights = {
                key: Int4Blocks.quantize(value) if name == "int4" and "_proj" in key else value
                for key, value in checkpoint.tensors.items()
            }
            spec = spec_from_config(checkpoint.config)
            return NativeBackbone(spec, weights, dtype=dtype, exact=name == "exact")
    return tiny_backbone(name, dtype)


def drafter_of(backbone: NativeBackbone, fields: dict[str, Any]) -> SelfDiffusionDrafter:
    if not fields:
        return SelfDiffusionDrafter(backbone, block_size=K + 1)
    return SelfDiffusionDrafter(backbone, random_adapter(backbone, K, **fields))


def run(
    case: str, lengths: tuple[int, ...], points: list[tuple[int, ...]], *, carries: bool
) -> tuple[ForwardOutput, list[Tensor], Tensor]:
    """Prefill rows, run a pass of 1 + 3 tokens, commit 3: output, committed K/V, whole cache."""
    name, dtype, fields = CASES[case]
    backbone = backbone_of(name, dtype)
    drafter = drafter_of(backbone, fields)
    params, vocab = SamplingParams(max_new_tokens=30), backbone.vocab_size
    prompts = random_prompts(*(n + 4 for n in lengths), vocab_size=vocab, seed=len(lengths))
    rows = [
        SequenceState(b, prompt[: n + 1], 1, params, torch.Generator())
        for b, (prompt, n) in enumerate(zip(prompts, lengths, strict=True))
    ]
    capacity = max(lengths) + 4 + (K + 1) * max(map(len, points))
    cache = backbone.new_cache(len(rows), capacity)
    hidden = {n: torch.zeros(len(rows), backbone.hidden_size, dtype=dtype) for n in drafter.taps}
    for row in rows:
        if row.cached_len:
            tokens = torch.tensor([row.tokens[:-1]])
            positions = torch.arange(row.cached_len)[None]
            pattern = causal([0], row.cached_len)
            out = backbone.forward(
                tokens, positions, pattern, cache, [row.row], write=Write.COMMIT, taps=drafter.taps
            )
            for n in drafter.taps:
                hidden[n][row.row] = out.hidden[n][0, -1]
    inputs = torch.tensor([p[-4:] for p in prompts])
    carried = None
    if carries:
        carried = drafter.carry(DraftState(rows, cache, hidden), inputs, points, K)
        assert carried is not None
        assert carried.pattern.num_tokens == carried.group_size * max(map(len, points))
    starts = [row.cached_len for row in rows]
    out = backbone.forward(
        inputs,
        torch.tensor(starts)[:, None] + torch.arange(4),
        causal(starts, 4),
        cache,
        [row.row for row in rows],
        taps=drafter.taps,
        carried=carried,
    )
    for row in rows:
        cache.commit(row.row, 3)
    kept = [
        cache.data[:, :, r.row, :, :n].clone() for r, n in zip(rows, cache.lengths, strict=True)
    ]
    return out, kept, cache.data


POINTS = {
    "all": [(0, 1, 2, 3)] * 5,
    "one": [(3,)] * 5,
    "ragged": [(2,), (0, 1, 3), (), (0,), (1, 2)],
}


@pytest.mark.parametrize("points", POINTS)
@pytest.mark.parametrize("case", CASES)
def test_a_carried_pass_changes_no_bit_of_the_target(case: str, points: str) -> None:
    for lengths in (LENGTHS, (16,), (9, 0, 17)):
        own = POINTS[points][: len(lengths)]
        plain, plain_kv, _ = run(case, lengths, own, carries=False)
        loaded, loaded_kv, whole = run(case, lengths, own, carries=True)
        assert plain.logits is not None
        assert loaded.logits is not None
        assert torch.equal(loaded.logits, plain.logits)
        assert all(torch.equal(a, b) for a, b in zip(loaded_kv, plain_kv, strict=True))
        assert all(torch.equal(loaded.hidden[n], taps) for n, taps in plain.hidden.items())
        assert plain.carried is None
        assert loaded.carried is not None
        assert loaded.carried.isfinite().all()
        assert loaded.carried.shape[:2] == (
            len(lengths),
            max(map(len, own)) * (K + (case != "llama-uniform")),
        )
        end = lengths[0] + 4  # behind the target's tokens stand the slots
        first = CASES[case][2].get("entry_layer", 0)
        assert (whole[first:, :, 0, :, end : end + K] != 0).any(dim=-1).all()


def test_slots_that_do_not_fit_are_refused_before_anything_is_written() -> None:
    backbone = backbone_of("llama", torch.float32)
    drafter = drafter_of(backbone, PLAIN)
    row = SequenceState(0, [5], 1, SamplingParams(), torch.Generator())
    for capacity, fits in ((2 * (K + 1) + 3, True), (2 * (K + 1) + 2, False)):
        cache = backbone.new_cache(1, capacity)
        inputs = torch.tensor([[5, 6, 7]])
        carried = drafter.carry(DraftState([row], cache, {}), inputs, [(0, 2)], K)
        arguments = (inputs, torch.arange(3)[None], causal([0], 3), cache, [0])
        if fits:
            backbone.forward(*arguments, carried=carried)
            continue
        with pytest.raises(CapacityError):
            backbone.forward(*arguments, carried=carried)
        assert not cache.data.any()
