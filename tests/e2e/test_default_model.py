"""The default model end to end: the same tokens as transformers, the same bits in every width."""

from __future__ import annotations

import pytest
import torch
from bits import decode_alone, decode_together

from hybrid import HybridDecoder
from hybrid.attention.pattern import causal
from hybrid.bench.prompts import PROMPTS
from hybrid.models.reference import TransformersReference
from hybrid.models.store import resolve
from hybrid.strategy import Strategy
from hybrid.types import Write

pytestmark = pytest.mark.default_model


def chat(decoder: HybridDecoder, text: str) -> list[int]:
    return decoder.tokenizer.chat([{"role": "user", "content": text}])


@pytest.fixture(scope="module")
def float32() -> HybridDecoder:
    return HybridDecoder.from_pretrained("default", dtype="float32")


@pytest.fixture(scope="module")
def int4() -> HybridDecoder:
    return HybridDecoder.from_pretrained("default")


def test_float32_tokens_equal_those_of_transformers(float32):
    reference = TransformersReference(resolve("default", "float32"))
    for text in PROMPTS[:3]:
        prompt = chat(float32, text)
        expected = list(reference.generate(prompt, 40))
        for strategy in ("ar", "ngram", "speculative"):
            result = float32.generate(prompt, max_new_tokens=40, strategy=strategy)
            assert list(result.token_ids) == expected, (text, strategy)


@pytest.mark.parametrize("strategy", ["ngram", "speculative", "hybrid"])
def test_packed_tokens_equal_those_of_ar(int4, strategy):
    for text in PROMPTS[:4]:
        prompt = chat(int4, text)
        expected = int4.generate(prompt, max_new_tokens=64, strategy="ar")
        assert int4.generate(prompt, max_new_tokens=64, strategy=strategy).text == expected.text


def test_packed_logits_have_the_same_bits_in_every_width(int4):
    """A verify pass of any number of rows computes what AR decoding computed, bit for bit."""
    backbone, prompt = int4.backbone, chat(int4, "Why is the sky blue?")
    tokens = [*prompt, *int4.generate(prompt, max_new_tokens=27, strategy="ar").token_ids]

    def logits(width: int) -> torch.Tensor:
        cache = backbone.new_cache(1, len(tokens) + width)
        start = len(prompt)
        backbone.forward(
            torch.tensor([prompt]),
            torch.arange(start)[None],
            causal([0], start),
            cache,
            [0],
            write=Write.COMMIT,
            num_logits=0,
        )
        rows = []
        for first in range(start, len(tokens) - width + 1, width):
            ids = torch.tensor([tokens[first : first + width]])
            positions = torch.arange(first, first + width)[None]
            out = backbone.forward(ids, positions, causal([first], width), cache, [0])
            cache.commit(0, width)
            rows.append(out.logits[0])
        return torch.cat(rows)

    one_by_one = logits(1)
    for width in (2, 3, 5, 8, 9, 13):
        wide = logits(width)
        assert torch.equal(one_by_one[: len(wide)], wide), width


def test_a_batch_gives_each_prompt_its_own_answer(int4):
    prompts = [chat(int4, text) for text in PROMPTS[:3]]
    alone = [int4.generate(p, max_new_tokens=24, logprobs=0) for p in prompts]
    together = int4.generate(prompts, max_new_tokens=24, logprobs=0)
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    assert [r.logprobs for r in together] == [r.logprobs for r in alone]


@pytest.mark.slow
def test_exact_bfloat16_has_no_differing_bit_in_20_prompts():
    """Verified in batches, with slots of the next draft and without, against one by one."""
    model = HybridDecoder.from_pretrained("default", dtype="bfloat16", exact=True)
    prompts = [chat(model, text) for text in PROMPTS[:20]]
    assert len(prompts) == 20
    widths: set[int] = set()
    for mode, first, last in (("two-pass", 0, 7), ("fused", 7, 14), ("one-pass", 14, 20)):
        batch = prompts[first:last]
        texts, logits = decode_alone(model, batch, max_new_tokens=8)
        strategy = Strategy.preset("speculative", mode=mode)
        differing, wide = decode_together(
            model, batch, texts, logits, strategy=strategy, max_new_tokens=8
        )
        assert differing == 0, mode
        widths |= wide
    assert len(widths) > 1
