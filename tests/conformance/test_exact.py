"""Exact verification: what a verify pass says of a token has the bits of AR decoding.

Whatever shares the pass: other drafted tokens, other rows, slots of the next draft.
"""

from __future__ import annotations

import random
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import decode_alone, decode_together
from diffusion_checkpoints import tiny_diffusion
from fakes import always_right, random_adapter, random_prompts, sometimes_wrong

from hybrid import HybridDecoder
from hybrid.models.adapter import own_drafts
from hybrid.models.checkpoint import open_checkpoint
from hybrid.models.elementwise import Elementwise
from hybrid.models.families import spec_from_config
from hybrid.models.family_table import FAMILIES
from hybrid.models.linear import DenseLinear, ReorderedLinear
from hybrid.models.name_maps import Renamed
from hybrid.models.tiny import tiny_checkpoint
from hybrid.models.transformer import NativeBackbone
from hybrid.strategy import Strategy

NEW = 20  # tokens of an answer
ODD = {"hidden_size": 72, "num_heads": 3, "num_kv_heads": 1, "intermediate_size": 100}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-odd": ("llama", {**ODD, "vocab_size": 131}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3-norms": ("qwen3", {"head_dim": 24}),
    "mistral-window": ("mistral", {"sliding_window": 6}),
    "nemotron-query-scale": ("nemotron", {}),
    "llada2-experts": ("llada2", {}),
}
OWN_DRAFTS = ("nemotron", "llada2")
ORACLES = {"right": always_right, "sometimes-wrong": sometimes_wrong}
BATCHES = {  # what drafts: how many prompts are decoded together
    "right": (1,),
    "sometimes-wrong": (1, 4),
    "ngram": (4,),
    "two-pass": (4,),
    "fused": (6,),
    "one-pass": (2, 3),
}
NUM_PROMPTS = sum(sum(sizes) for sizes in BATCHES.values())


@cache
def backbone_of(case: str, dtype: torch.dtype, *, exact: bool, reorder: bool) -> NativeBackbone:
    family, fields = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        if family in OWN_DRAFTS:
            path = tiny_diffusion(Path(folder), family, **fields)
        else:
            path = tiny_checkpoint(folder, family, tokenizer=False, **fields)
        checkpoint = open_checkpoint(path)
        spec = spec_from_config(checkpoint.config)
        weights = Renamed(checkpoint.tensors, FAMILIES[spec.family].names)
        return NativeBackbone(spec, weights, dtype=dtype, exact=exact, reorder=reorder)


def decoder(backbone: NativeBackbone, kind: str, texts: list[list[int]]) -> HybridDecoder:
    """Drafts of up to 16 tokens from what is known of the answers, or of what else there is."""
    if kind in ORACLES:
        drafter = ORACLES[kind](texts, 16)
        drafter.vocab_size = backbone.vocab_size
        return HybridDecoder(backbone, drafter=drafter)
    if kind == "ngram":
        return HybridDecoder(backbone, drafter="ngram", num_draft_tokens=9)
    has_own = backbone.mask_token_id is not None
    adapter = own_drafts(backbone) if has_own else random_adapter(backbone, 6)
    return HybridDecoder(backbone, adapter=adapter, drafter="self-diffusion")


def compare(case: str, dtype: torch.dtype, **fields: bool) -> tuple[int, int, set[int]]:
    """Decode each prompt alone by `ar`, and all in batches with drafts.

    Returns:
        Positions, how many of them differ, and how wide the verify passes were.
    """
    backbone = backbone_of(case, dtype, **fields)
    draw = random.Random(case)
    lengths = [draw.choice((1, 2, 7, 15, 16, 17, 33)) for _ in range(NUM_PROMPTS)]
    vocab_size = min(backbone.vocab_size, 40)  # without mask and end tokens of diffusion models
    prompts = iter(random_prompts(*lengths, vocab_size=vocab_size, seed=len(case)))
    params = {"max_new_tokens": NEW, "ignore_eos": True, "allow_unverified": True}
    num_positions, num_differing, widths = 0, 0, set()
    for kind, sizes in BATCHES.items():
        for size in sizes:
            batch = [next(prompts) for _ in range(size)]
            texts, logits = decode_alone(HybridDecoder(backbone), batch, **params)
            mode = kind if kind in ("fused", "one-pass") else "two-pass"
            strategy = Strategy.preset("speculative", mode=mode)
            model = decoder(backbone, kind, texts)
            found, wide = decode_together(model, batch, texts, logits, strategy=strategy, **params)
            num_positions += len(logits)
            num_differing += found
            widths |= wide
    return num_positions, num_differing, widths


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_has_no_differing_bit_in_25_prompts_of_each_family(case: str) -> None:
    """200 in all; the layout is the one that a CPU decodes with, where it has it."""
    num_positions, num_differing, widths = compare(case, torch.bfloat16, exact=True, reorder=True)
    assert num_positions == NUM_PROMPTS * NEW
    assert num_differing == 0
    assert 17 in widths
    assert len(widths) > 8


@pytest.mark.parametrize("case", ["llama-odd", "qwen2-tied"])
@pytest.mark.parametrize("reorder", [False, True], ids=["plain", "reordered"])
def test_float32_has_none_either(case: str, reorder: bool) -> None:
    assert compare(case, torch.float32, exact=True, reorder=reorder)[1] == 0


def test_without_it_some_differ() -> None:
    """The test can fail: in float32 a lone row takes other code."""
    num_positions, num_differing, _ = compare("llama", torch.float32, exact=False, reorder=False)
    assert num_differing > num_positions / 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", [DenseLinear, ReorderedLinear], ids=lambda c: c.__name__)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_exact_products_of_the_default_models_shapes(threads, layout, dtype):
    """Alone, among others and in any place of a tile."""
    if layout is ReorderedLinear and not ReorderedLinear.runs(torch.device("cpu"), dtype):
        pytest.skip("this build of torch, or this CPU, has no such kernels")
    draw, before = torch.Generator().manual_seed(threads), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for num_out, num_in in ((960, 576), (576, 1536), (131, 72), (33, 7)):
            weight = torch.randn(num_out, num_in, generator=draw).to(dtype)
            bias = torch.randn(num_out, generator=draw).to(dtype)
            layer = layout(weight, bias, exact=True)
            x = torch.randn(50, num_in, generator=draw).to(dtype)
            together = layer(x)
            for count in (1, 2, 3, 9, 16, 17, 33):
                assert torch.equal(layer(x[:count]), together[:count]), count
                assert torch.equal(layer(x[-count:]), together[-count:]), count
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_gate_of_an_exact_row_is_its_own(threads: int) -> None:
    """Threads part a tensor anywhere, and a vector unit leaves over what it finds there."""
    width, before = 1000, torch.get_num_threads()
    gate = Elementwise(exact=True).gate
    x = 3 * torch.randn(47, 2 * width, generator=torch.Generator().manual_seed(0))
    torch.set_num_threads(threads)
    try:
        together, alone = gate(x), torch.cat([gate(row[None]) for row in x])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together, alone)
