"""Tiny models of few tokens for tests that mix the modes of a step, and what must hold of them."""

from __future__ import annotations

from functools import cache

import torch
from carrying import diffusion_backbone
from fakes import random_adapter, random_prompts, tiny_backbone

from hybrid.attention.pattern import causal
from hybrid.decode.reference import reference_logits
from hybrid.drafters.combined import CombinedDrafter
from hybrid.drafters.self_diffusion import SelfDiffusionDrafter
from hybrid.params import SamplingParams
from hybrid.types import Write

NEW, K = 14, 4
VOCAB, MASK = 6, 5  # so few tokens that random drafts are often right
SEEDS = {"llama": 3, "qwen2": 0, "qwen3": 5, "mistral-window": 2}  # with varied answers
# Of adapters that are right more often than others: there.
ADAPTERS = {("plain", "llama"): 2, ("plain", "mistral-window"): 3, ("uniform", "llama"): 1}
PROMPTS = random_prompts(9, 1, 17, vocab_size=VOCAB)
LONG = SamplingParams(max_new_tokens=NEW)
KINDS = {
    "late": {"entry_layer": 1, "feature_layers": (0, 2)},
    "combined": {"entry_layer": 1, "feature_layers": (0, 2)},
    "sampler": {"entry_layer": 1, "sampler_size": 4},
    "plain": {"entry_layer": 0, "mask_token_id": MASK},
    "uniform": {"entry_layer": 0, "corruption": "uniform", "train_norms": False},
}


def tiny(family="llama", vocab_size=VOCAB, **fields):
    return tiny_backbone(family, vocab_size=vocab_size, seed=SEEDS[family], **fields)


def make(kind, family="llama", **fields):
    """A drafter and its backbone."""
    if kind == "own":
        ids = {"vocab_size": VOCAB, "mask_token_id": MASK, "eos_token_id": VOCAB + 1}
        backbone = diffusion_backbone("nemotron", **ids)
        return SelfDiffusionDrafter(backbone, block_size=K + 1), backbone
    backbone = tiny(family, **fields)
    seed = ADAPTERS.get((kind, family), 4 if family == "llama" else 6)
    adapter = random_adapter(backbone, K, seed=seed, **KINDS[kind])
    drafter = CombinedDrafter if kind == "combined" else SelfDiffusionDrafter
    return drafter(backbone, adapter), backbone


@cache
def greedy(backbone, prompt, num_new, barred=()):
    """Plain greedy decoding from scratch."""
    tokens = list(prompt)
    for _ in range(num_new):
        logits = reference_logits(backbone, tokens)[-1].clone()
        logits[list(barred)] = float("-inf")
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def check_cache(engine, rows, backbone):
    """The committed cache is that of a fresh prefill."""
    for row in rows:
        length = engine.cache.lengths[row.row]
        if row.num_new_tokens == 0 or row.finish_reason is not None:
            continue
        assert length == row.cached_len
        fresh = backbone.new_cache(1, length)
        inputs, positions = torch.tensor([row.tokens[:length]]), torch.arange(length)[None]
        backbone.forward(inputs, positions, causal([0], length), fresh, [0], write=Write.COMMIT)
        ours, theirs = engine.cache.data[:, :, row.row, :, :length], fresh.data[:, :, 0, :, :length]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
