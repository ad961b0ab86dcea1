"""Guided diffusion against plain loops over both models, and what a guide accepts by hand."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from block_twins import MASK, VOCAB, cut, decode, model
from fakes import random_prompts, tiny_backbone
from torch import Tensor

from hybrid.attention.pattern import causal, full_sequence
from hybrid.drafters.denoise.guided import Guided
from hybrid.errors import ConfigError
from hybrid.models.tiny import tiny_checkpoint
from hybrid.models.transformer import NativeBackbone

PROMPTS = random_prompts(9, 1, 4, vocab_size=20, seed=1)
LIMIT = 11


def guide_model(**changes: Any) -> NativeBackbone:
    guide = copy.copy(tiny_backbone("llama", torch.float64, VOCAB, scale=1.0))
    for name, value in {"prefill_chunk": 3, **changes}.items():
        setattr(guide, name, value)
    return guide


def logits_of(backbone: Any, tokens: list[int], *, is_causal: bool) -> Tensor:
    pattern = causal([0], len(tokens)) if is_causal else full_sequence(1, len(tokens))
    cache = backbone.new_cache(1, len(tokens))
    ids, at = torch.tensor([tokens]), torch.arange(len(tokens))[None]
    logits: Tensor = backbone.forward(ids, at, pattern, cache, [0]).logits[0].clone()
    return logits


def accepted(strategy: str, law: Tensor, token: int) -> bool:
    p, order = float(law[token]), law.argsort(descending=True).tolist()
    if strategy == "deterministic":
        return order[0] == token
    if strategy == "dynamic_threshold":
        return p > 0.03
    if strategy == "aggressive":
        nucleus = float(law[order[: order.index(token) + 1]].sum()) <= 0.95
        return token in order[:5] or p > 0.05 or nucleus
    near = p >= 0.3 * float(law.max()) or strategy == "topk"
    return token in order[:6] and near


def twin(
    backbone: Any, guide: Any, prompt: list[int], limit: int, strategy: str
) -> tuple[list[int], int]:
    """Return the answer and the number of passes, nothing cached, a token at a time."""
    known, calls = list(prompt), 0
    while len(known) < len(prompt) + limit:
        num_masked = len(prompt) + limit - len(known)
        logits = logits_of(backbone, [*known, *[MASK] * num_masked], is_causal=False)
        logits[:, MASK] = float("-inf")
        drafts = logits.argmax(-1)[len(known) - backbone.logit_shift :][:num_masked].tolist()
        calls += 1
        count = 0
        while count < num_masked:
            law = logits_of(guide, [*known, *drafts[:count]], is_causal=True)[-1].softmax(-1)
            if not accepted(strategy, law, drafts[count]):
                break
            count += 1
        known += drafts[: max(count, 1)]
    return known[len(prompt) :], calls


LENIENT: dict[str, Any] = {
    "confidence_threshold": 0.03, "acceptance_top_k": 6, "relative_threshold": 0.3
}  # fmt: skip
STRATEGIES = ["deterministic", "dynamic_threshold", "topk", "topk_relative", "aggressive"]


@pytest.mark.parametrize("size", [1, 4, 32])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_is_the_published_algorithm(strategy: str, shift: int, size: int) -> None:
    backbone, guide = model(shift), guide_model()
    preset = Guided(guide=guide, sampling_strategy=strategy, verify_batch_size=size, **LENIENT)
    counts = set()
    for prompt in PROMPTS:
        (answer,), (passes,) = decode(backbone, preset, [prompt], LIMIT, ignore_eos=True)
        assert (answer, passes) == twin(backbone, guide, prompt, LIMIT, strategy)
        counts.add(passes)
    if strategy != "deterministic":
        assert min(counts) < LIMIT, "else the guide accepts nothing"


def test_a_guide_that_accepts_everything_or_nothing() -> None:
    backbone = model()
    everything = Guided(
        guide=guide_model(), sampling_strategy="dynamic_threshold", confidence_threshold=0
    )
    for prompt in PROMPTS:
        (answer,), passes = decode(backbone, everything, [prompt], LIMIT, ignore_eos=True)
        logits = logits_of(backbone, [*prompt, *[MASK] * LIMIT], is_causal=False)
        logits[:, MASK] = float("-inf")
        assert answer == logits.argmax(-1)[len(prompt) :].tolist()
        assert passes == [1]
    nothing = Guided(
        guide=guide_model(), sampling_strategy="dynamic_threshold", confidence_threshold=0.999
    )
    assert decode(backbone, nothing, [PROMPTS[0]], LIMIT, ignore_eos=True)[1] == [LIMIT]


@pytest.mark.parametrize("strategy", ["topk", "original"])
def test_a_row_does_not_depend_on_the_batch(strategy: str) -> None:
    backbone = model()
    preset = Guided(guide=guide_model(), sampling_strategy=strategy, **LENIENT)
    settings: dict[str, Any] = {"ignore_eos": True, "temperature": float(strategy == "original")}
    answers, passes = decode(backbone, preset, PROMPTS, LIMIT, **settings)
    for prompt, answer, count in zip(PROMPTS, answers, passes, strict=True):
        assert decode(backbone, preset, [prompt], LIMIT, **settings) == ([answer], [count])


def test_eos_and_a_mask_id_in_the_prompt() -> None:
    guide, prompt = guide_model(), [MASK, 3, MASK]
    preset = Guided(guide=guide, sampling_strategy="topk", **LENIENT)
    (answer,), _ = decode(model(), preset, [prompt], LIMIT, ignore_eos=True)
    assert answer == twin(model(), guide, prompt, LIMIT, "topk")[0]
    (short,), _ = decode(model(eos_token_ids=(answer[3],)), preset, [prompt], LIMIT)
    assert short == cut(answer, LIMIT, [answer[3]])


def test_tokens_beyond_the_guides_vocabulary_are_never_accepted() -> None:
    """Checkpoints of one tokenizer pad their vocabularies differently."""
    guide = copy.copy(tiny_backbone("llama", torch.float64, 6, scale=1.0))
    everything = Guided(guide=guide, sampling_strategy="dynamic_threshold", confidence_threshold=0)
    (answer,), (passes,) = decode(model(), everything, [PROMPTS[0]], LIMIT, ignore_eos=True)
    assert passes > 1
    assert any(token >= 6 for token in answer), "the leftmost prediction stays"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"sampling_strategy": "deterministic"}, [1, 0, 0, 0]),
        ({"sampling_strategy": "dynamic_threshold"}, [1, 1, 0, 0]),  # 0.1 is not above 0.1
        ({"sampling_strategy": "topk"}, [1, 1, 0, 0]),
        ({"sampling_strategy": "topk", "acceptance_top_k": 3}, [1, 1, 1, 0]),
        ({"sampling_strategy": "topk_relative"}, [1, 1, 0, 0]),  # 0.25 is half of 0.5
        ({"sampling_strategy": "topk_relative", "relative_threshold": 0.51}, [1, 0, 0, 0]),
        ({"sampling_strategy": "original"}, [1, 0, 1, 0]),
        ({"sampling_strategy": "aggressive"}, [1, 1, 1, 0]),
    ],
)
def test_what_is_accepted_by_hand(fields: dict[str, Any], expected: list[int]) -> None:
    law = torch.tensor([0.5, 0.25, 0.1, 0.0625, 0.05, 0.0375, 0.0])
    tokens, chance = torch.tensor([0, 1, 2, 6]), torch.tensor([0.4, 0.25, 0.05, 0.0])
    found = Guided(**fields).accepts(law.repeat(4, 1), tokens, chance)
    assert found.int().tolist() == expected


def test_aggressive_takes_the_nucleus_too() -> None:
    law = torch.tensor([[0.2, 0.2, 0.2, 0.1, 0.1, 0.04, 0.04, 0.04, 0.04, 0.04]])
    preset = Guided(sampling_strategy="aggressive")
    flat = torch.full((1, 40), 1 / 40)
    assert preset.accepts(flat, torch.tensor([39]), torch.zeros(1)).tolist() == [True], "ties"
    rising = torch.arange(40.0).softmax(0).mul(0.0).add(torch.linspace(0.03, 0.02, 40))[None]
    found = [preset.accepts(rising, torch.tensor([n]), torch.zeros(1)).item() for n in (5, 30, 39)]
    assert found == [True, True, False]
    assert preset.accepts(law, torch.tensor([5]), torch.zeros(1)).item() is False


def test_the_guide_is_loaded_from_a_folder_once(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "llama", tokenizer=False, vocab_size=VOCAB, scale=1.0)
    backbone = model(dtype=torch.float32)
    preset = Guided(guide=str(path), sampling_strategy="topk")
    first = preset.start(backbone, 3, 4).rule._guide  # type: ignore[attr-defined]
    assert first.dtype == torch.float32
    assert preset.start(backbone, 5, 4).rule._guide is first  # type: ignore[attr-defined]


def test_what_cannot_guide_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a folder: an AR model with the same tokenizer"):
        Guided().start(model(), 3, 4)
    large = copy.copy(guide_model())
    large.vocab_size = 5000
    with pytest.raises(ConfigError, match="guide: got 5000 tokens and an AR model"):
        Guided(guide=large).start(model(), 3, 4)
    blind = copy.copy(guide_model())
    blind.can_verify = False
    with pytest.raises(ConfigError, match="a model that is not autoregressive"):
        Guided(guide=blind).start(model(), 3, 4)
    with pytest.raises(ConfigError, match="sampling_strategy"):
        Guided(sampling_strategy="best")


def test_a_guide_of_another_type_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="guide: got int, expected a folder, a name or a Backbone"
    ):
        Guided(guide=3).start(tiny_backbone(mask_token_id=5), 3, 4)
