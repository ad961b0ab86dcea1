"""Rope against transformers' rotary module, a float64 twin, and parse_rope's reading of configs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hybrid.errors import CheckpointError
from hybrid.models.rope import Rope, parse_rope
from hybrid.models.spec import RopeSpec

HEAD_DIM = 32
TRAINED = 64
FAR = torch.cat([torch.arange(200), torch.tensor([1023, 4095, 65535, 131071])])[None]

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
STATIC = {
    "default": {"rope_type": "default"},
    "theta": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": LLAMA3,
    "llama3-inherits-original": {**LLAMA3, "original_max_position_embeddings": None},
    "yarn": YARN,
    "yarn-attention-factor": {**YARN, "attention_factor": 0.7},
    "yarn-mscale": {**YARN, "mscale": 0.9, "mscale_all_dim": 0.4},
    "yarn-mscale-alone": {**YARN, "mscale": 0.9},
    "yarn-betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-no-truncate": {**YARN, "truncate": False},
    "yarn-factor-null": {**YARN, "factor": None},
    "yarn-factor-below-1": {**YARN, "factor": 0.5},
}


def config(rope: dict[str, Any], **fields: Any) -> dict[str, Any]:
    rope = {k: v for k, v in rope.items() if v is not None or k == "factor"}
    return {
        "hidden_size": 2 * HEAD_DIM,
        "num_attention_heads": 2,
        "max_position_embeddings": TRAINED,
        "rope_parameters": {"rope_theta": 10000.0, **rope},
        **fields,
    }


def reference(fields: dict[str, Any]) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(LlamaConfig(**fields))


def expect(module: LlamaRotaryEmbedding, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
    cos, sin = module(torch.zeros(1), positions)
    half = HEAD_DIM // 2
    assert torch.equal(cos[..., :half], cos[..., half:])
    return cos[..., :half], sin[..., :half]


@pytest.mark.parametrize("name", STATIC)
def test_static_kinds_equal_transformers_far_past_the_trained_context(name: str) -> None:
    fields = config(STATIC[name])
    cos, sin = Rope(parse_rope(fields), HEAD_DIM, "cpu")(FAR)
    want_cos, want_sin = expect(reference(config(STATIC[name])), FAR)
    assert cos.dtype == torch.float32
    torch.testing.assert_close(cos, want_cos, rtol=0, atol=1e-6)
    torch.testing.assert_close(sin, want_sin, rtol=0, atol=1e-6)


def test_static_kinds_differ_from_default() -> None:
    """Guards the table above: a kind that were ignored would pass if the reference ignored it."""
    plain, _ = Rope(RopeSpec(), HEAD_DIM, "cpu")(FAR)
    for name, rope in STATIC.items():
        cos, _ = Rope(parse_rope(config(rope)), HEAD_DIM, "cpu")(FAR)
        assert torch.equal(cos, plain) == (name == "default"), name


def test_default_equals_a_float64_twin() -> None:
    """Near positions, where float32 angles are accurate; the twin is the paper's formula."""
    positions = torch.arange(256)
    cos, sin = Rope(RopeSpec(theta=1e6), HEAD_DIM, "cpu")(positions[None])
    index = torch.arange(HEAD_DIM // 2, dtype=torch.float64)
    angles = positions[:, None].double() * 1e6 ** (-2 * index / HEAD_DIM)
    torch.testing.assert_close(cos[0].double(), angles.cos(), rtol=0, atol=2e-5)
    torch.testing.assert_close(sin[0].double(), angles.sin(), rtol=0, atol=2e-5)


def test_rotation_gives_scores_that_depend_on_distance_only() -> None:
    rope = Rope(RopeSpec(), HEAD_DIM, "cpu")
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, HEAD_DIM, generator=generator, dtype=torch.float64)

    def rotate(x: torch.Tensor, position: int) -> torch.Tensor:
        cos, sin = (t[0, 0].double() for t in rope(torch.tensor([[position]])))
        x1, x2 = x.chunk(2)
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin])

    scores = [rotate(q, 7 + p) @ rotate(k, p) for p in (0, 3, 90)]
    torch.testing.assert_close(torch.stack(scores), scores[0].expand(3), rtol=0, atol=1e-4)


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}


@pytest.mark.parametrize("length", [10, TRAINED, TRAINED + 1, 200, 1000])
def test_dynamic_prefill_equals_transformers(length: int) -> None:
    positions = torch.arange(length)[None]
    rope = Rope(parse_rope(config(DYNAMIC)), HEAD_DIM, "cpu")
    cos, sin = rope(positions, torch.full_like(positions, length))
    want_cos, want_sin = expect(reference(config(DYNAMIC)), positions)
    torch.testing.assert_close(cos, want_cos, rtol=0, atol=1e-6)
    torch.testing.assert_close(sin, want_sin, rtol=0, atol=1e-6)


def test_dynamic_decode_equals_transformers_token_by_token() -> None:
    """Each token of a verify pass gets the frequencies that AR decoding gives it."""
    rope, module = Rope(parse_rope(config(DYNAMIC)), HEAD_DIM, "cpu"), reference(config(DYNAMIC))
    positions = torch.arange(TRAINED - 4, TRAINED + 60)[None]
    cos, sin = rope(positions)
    steps = [expect(module, positions[:, i : i + 1]) for i in range(positions.shape[1])]
    torch.testing.assert_close(cos, torch.cat([c for c, _ in steps], 1), rtol=0, atol=1e-6)
    torch.testing.assert_close(sin, torch.cat([s for _, s in steps], 1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", [*STATIC, "dynamic"])
def test_a_tokens_bits_do_not_depend_on_the_pass_width(name: str) -> None:
    rope = Rope(parse_rope(config({**STATIC, "dynamic": DYNAMIC}[name])), HEAD_DIM, "cpu")
    wide = rope(FAR)
    for index in (0, 3, 100, 150, FAR.shape[1] - 1):
        one = rope(FAR[:, index : index + 1])
        assert all(torch.equal(a[:, index : index + 1], b) for a, b in zip(wide, one, strict=True))


def test_parse_reads_both_generations_of_config() -> None:
    new = config(YARN)
    old = {k: v for k, v in new.items() if k != "rope_parameters"}
    old |= {"rope_theta": 10000.0, "rope_scaling": {**YARN, "type": "yarn"}}
    legacy = {k: v for k, v in YARN.items() if k != "rope_type"} | {"type": "yarn"}
    assert parse_rope(new) == parse_rope(old) == parse_rope({**old, "rope_scaling": legacy})
    assert parse_rope({**old, "rope_scaling": None}) == RopeSpec(max_seq_len=TRAINED)


def test_parse_prefers_the_outer_original_context() -> None:
    fields = config(YARN, original_max_position_embeddings=16)
    assert parse_rope(fields).params["original_max_position_embeddings"] == 16
    cos, _ = Rope(parse_rope(fields), HEAD_DIM, "cpu")(FAR)
    want, _ = expect(reference(fields), FAR)
    torch.testing.assert_close(cos, want, rtol=0, atol=1e-6)


def test_query_scale_grows_step_by_step_beyond_the_trained_context() -> None:
    spec = parse_rope(config({**YARN, "llama_4_scaling_beta": 0.1}))
    scale = Rope(spec, HEAD_DIM, "cpu").query_scale(torch.tensor([[0, 31, 32, 63, 64, 320]]))
    want = [1 + 0.1 * math.log(1 + step) for step in (0, 0, 1, 1, 2, 10)]
    assert scale is not None
    torch.testing.assert_close(scale, torch.tensor([want]))
    assert Rope(parse_rope(config(YARN)), HEAD_DIM, "cpu").query_scale(FAR) is None


def test_a_partial_rotation_is_that_of_a_smaller_head() -> None:
    fields = {**config({"rope_type": "default"}), "partial_rotary_factor": 0.25}
    rope = Rope(parse_rope(fields, may_be_partial=True), HEAD_DIM, "cpu")
    assert rope.dim == HEAD_DIM // 4
    small = Rope(parse_rope(config({"rope_type": "default"})), HEAD_DIM // 4, "cpu")
    for part, want in zip(rope(FAR), small(FAR), strict=True):
        assert torch.equal(part, want)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, r"'longrope'.*default, linear, dynamic, yarn"),
        ({"rope_type": "linear"}, "needs 'factor'"),
        ({"rope_type": "linear", "factor": 0}, "factor: got 0"),
        ({"rope_type": "yarn"}, "needs 'factor'"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor"),
        ({"rope_type": "default", "rope_theta": "big"}, "rope_theta: got 'big'"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5"),
        (
            {**YARN, "llama_4_scaling_beta": "0.1"},
            "llama_4_scaling_beta: got '0.1', expected a number above 0",
        ),
        (
            {"rope_type": "default", "llama_4_scaling_beta": 0.1},
            "original_max_position_embeddings: got None",
        ),
        ({"full_attention": {"rope_type": "default"}}, "one flat table"),
    ],
)
def test_parse_refuses(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_rope({"max_position_embeddings": TRAINED, "rope_parameters": rope})
