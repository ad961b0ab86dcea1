"""Configs translate as transformers reads them, and the native backbone then computes the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from hybrid import HybridDecoder
from hybrid.attention.pattern import causal
from hybrid.errors import CheckpointError
from hybrid.models.checkpoint import open_checkpoint
from hybrid.models.families import is_native, spec_from_config, why_not_native
from hybrid.models.spec import RopeSpec
from hybrid.models.tiny import tiny_checkpoint
from hybrid.models.transformer import NativeBackbone
from hybrid.protocols import PREFILL_CHUNK
from hybrid.types import Write

# 5.24 renamed the argument; this is the name that all supported versions take.
pytestmark = pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")

SIZES = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
}
MIXED = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]


def sizes(family: str, **fields: Any) -> dict[str, Any]:
    return {"model_type": family, **SIZES, "head_dim": 2, **fields}


# ---- translation


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize(
    "fields",
    [
        {"head_dim": None},
        {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
        {"eos_token_id": [3, 4], "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
        {"eos_token_id": None, "max_position_embeddings": 99, "rope_theta": 5e5},
        {"eos_token_id": 7},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_spec_has_the_values_that_transformers_has(family: str, fields: dict[str, Any]) -> None:
    """Including defaults of what the config leaves out."""
    config = sizes(family, **fields)
    if config["head_dim"] is None:
        del config["head_dim"]
    spec, want = spec_from_config(config), AutoConfig.for_model(**config)
    assert spec.num_kv_heads == want.num_key_value_heads
    assert spec.head_dim == (getattr(want, "head_dim", None) or 64 // 32)
    assert spec.norm_eps == want.rms_norm_eps
    assert spec.max_seq_len == want.max_position_embeddings
    assert spec.tie_embeddings == want.tie_word_embeddings
    assert spec.rope.theta == want.rope_parameters["rope_theta"]
    eos = want.eos_token_id
    assert spec.eos_token_ids == (
        () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    )


@pytest.mark.parametrize(
    ("family", "fields", "windows"),
    [
        ("llama", {}, (None,) * 4),
        ("mistral", {}, (4096,) * 4),
        ("mistral", {"sliding_window": 8}, (8,) * 4),
        ("mistral", {"sliding_window": None}, (None,) * 4),
        ("qwen2", {"sliding_window": 8}, (None,) * 4),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 3}, (None,) * 3 + (4096,)),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8}, (None,) * 4),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": MIXED},
            (None, 8, None, 8),
        ),
        (
            "qwen2",
            {"use_sliding_window": False, "layer_types": ["full_attention"] * 4},
            (None,) * 4,
        ),
    ],
)
def test_sliding_windows(
    family: str, fields: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert spec_from_config(sizes(family, **fields)).sliding_windows == windows


def test_biases_and_norms_follow_the_family() -> None:
    def flags(family: str) -> tuple[bool, ...]:
        spec = spec_from_config(sizes(family, attention_bias=True, mlp_bias=True))
        return spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.qk_norm

    assert flags("llama") == (True, True, True, False)
    assert flags("qwen2") == (True, False, False, False)
    assert flags("qwen3") == (True, True, False, True)
    assert flags("mistral") == (False, False, False, False)
    assert spec_from_config(sizes("llama")).qkv_bias is False
    assert spec_from_config(sizes("qwen2")).qkv_bias is True


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": None}, "None"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ({"sliding_window": 8}, "sliding_window"),
        ({"model_type": "mistral", "layer_types": MIXED}, "layer_types"),
    ],
)
def test_what_it_cannot_represent_is_not_native(fields: dict[str, Any], reason: str) -> None:
    config = {**sizes("llama"), **fields}
    assert not is_native(config)
    assert reason in str(why_not_native(config))
    with pytest.raises(CheckpointError, match=f"{reason}.*Hugging Face backbone"):
        spec_from_config(config)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": None}, "no 'vocab_size'"),
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: got 0"),
        ({"num_attention_heads": "8"}, "num_attention_heads: got '8'"),
        ({"intermediate_size": True}, "intermediate_size: got True"),
        ({"num_key_value_heads": 5}, "num_key_value_heads: got 5"),
        ({"head_dim": 3}, "head_dim: got 3"),
        ({"head_dim": None, "hidden_size": 48}, "hidden_size: got 48, expected a multiple of 32"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps: got 'small'"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window: got 0"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "layer_types": MIXED[:3]},
            "layer_types: got 3 entries",
        ),
    ],
)
def test_a_missing_or_invalid_field_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        spec_from_config({**sizes("llama"), **fields})


# ---- agreement with transformers


PREFILL, TOTAL = 20, 44
CONTEXT = 32  # `max_position_embeddings`: the last tokens lie beyond it
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": YARN,
    "llama3": LLAMA3,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("llama", {"num_kv_heads": 4}),
    "llama-mqa-wide-heads": ("llama", {"num_kv_heads": 1, "head_dim": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-biases": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3-window": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 7, "layer_types": MIXED[:3]},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "ministral3": ("ministral3", {"rope": {**YARN, "llama_4_scaling_beta": 0.1}}),
    "ministral3-window": (
        "ministral3",
        {"rope": {**YARN, "llama_4_scaling_beta": 0.3}, "sliding_window": 7},
    ),
    "mistral-window": ("mistral", {"sliding_window": 7, "tie_word_embeddings": True}),
    **{
        f"{family}-{kind}": (family, {"rope": {"rope_theta": 1000.0, **rope}})
        for family in ("llama", "qwen2", "qwen3", "mistral")
        for kind, rope in ROPES.items()
    },
}


class Pair:
    """One random checkpoint in both implementations, and the tokens to run."""

    def __init__(self, directory: Path, family: str, fields: dict[str, Any]) -> None:
        defaults = {"tokenizer": False, "max_position_embeddings": CONTEXT, "num_layers": 3}
        path = tiny_checkpoint(directory, family, **{**defaults, **fields})
        checkpoint = open_checkpoint(path)
        self.native = NativeBackbone(spec_from_config(checkpoint.config), checkpoint.tensors)
        self.reference = AutoModelForCausalLM.from_pretrained(path).eval()
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(0, 64, (1, TOTAL), generator=generator)

    @torch.no_grad()
    def expected(self, prefill: int) -> Tensor:
        """Logits [TOTAL, V] of a prefill and one-token steps through transformers' own cache."""
        output = self.reference(self.tokens[:, :prefill], use_cache=True)
        logits = [output.logits[0]]
        for index in range(prefill, TOTAL):
            token = self.tokens[:, index : index + 1]
            output = self.reference(token, past_key_values=output.past_key_values, use_cache=True)
            logits.append(output.logits[0])
        return torch.cat(logits)

    def run(self, cache: Any, start: int, end: int, *, write: Write = Write.SCRATCH) -> Tensor:
        """Native logits [end - start, V] of tokens start..end, whose predecessors are cached."""
        output = self.native.forward(
            self.tokens[:, start:end],
            torch.arange(start, end)[None],
            causal((start,), end - start),
            cache,
            (0,),
            write=write,
        )
        assert output.logits is not None
        return output.logits[0]


@pytest.mark.parametrize("case", CASES)
def test_native_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    """A whole prefill, and a prefill followed by passes of 1, 1, 5, 2, ... tokens."""
    pair = Pair(tmp_path, *CASES[case])
    close = {"rtol": 0.0, "atol": 1e-4}
    whole = pair.run(pair.native.new_cache(1, TOTAL), 0, TOTAL, write=Write.COMMIT)
    torch.testing.assert_close(whole, pair.expected(TOTAL), **close)

    cache, want, start = pair.native.new_cache(1, TOTAL), pair.expected(PREFILL), PREFILL
    first = pair.run(cache, 0, PREFILL, write=Write.COMMIT)
    torch.testing.assert_close(first, want[:PREFILL], **close)
    for width in (1, 1, 5, 2, 9, 1, 5):
        got = pair.run(cache, start, start + width)
        torch.testing.assert_close(got, want[start : start + width], **close)
        cache.commit(0, width)
        start += width
    assert start == TOTAL


SENSITIVE: list[tuple[str, dict[str, Any]]] = [
    ("qwen3-window", {"sliding_windows": (None,) * 3}),
    ("qwen3", {"qk_norm": False}),
    ("qwen2", {"qkv_bias": False}),
    ("llama-biases", {"o_bias": False}),
    ("llama-biases", {"mlp_bias": False}),
    *((f"llama-{kind}", {"rope": RopeSpec(theta=1000.0, max_seq_len=CONTEXT)}) for kind in ROPES),
]


@pytest.mark.parametrize(
    ("case", "changes"), SENSITIVE, ids=lambda x: x if isinstance(x, str) else "-".join(x)
)
def test_the_cases_are_sensitive(case: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Leaving a feature out moves the logits far more than the agreement test allows."""
    pair = Pair(tmp_path, *CASES[case])
    right = pair.run(pair.native.new_cache(1, TOTAL), 0, TOTAL, write=Write.COMMIT)
    spec = dataclasses.replace(pair.native.spec, **changes)
    pair.native = NativeBackbone(spec, open_checkpoint(tmp_path).tensors)
    wrong = pair.run(pair.native.new_cache(1, TOTAL), 0, TOTAL, write=Write.COMMIT)
    assert (right - wrong).abs().max() > 0.1


@pytest.mark.parametrize("case", ["llama", "qwen3-window", "llama-dynamic"])
def test_ragged_rows_equal_their_solo_runs(case: str, tmp_path: Path) -> None:
    pair = Pair(tmp_path, *CASES[case])
    lengths, width = (3, 17, 30), 4
    together = pair.native.new_cache(3, TOTAL)
    solo = []
    for row, length in enumerate(lengths):
        tokens, positions = pair.tokens[:, :length], torch.arange(length)[None]
        pattern = causal((0,), length)
        pair.native.forward(tokens, positions, pattern, together, (row,), write=Write.COMMIT)
        alone = pair.native.new_cache(1, TOTAL)
        pair.run(alone, 0, length, write=Write.COMMIT)
        solo.append(pair.run(alone, length, length + width))
    output = pair.native.forward(
        torch.cat([pair.tokens[:, n : n + width] for n in lengths]),
        torch.stack([torch.arange(n, n + width) for n in lengths]),
        causal(lengths, width),
        together,
        (0, 1, 2),
    )
    assert output.logits is not None
    torch.testing.assert_close(output.logits, torch.stack(solo), rtol=0, atol=1e-5)


def test_a_dynamic_prompt_longer_than_a_prefill_chunk_is_rotated_as_one(tmp_path: Path) -> None:
    """Its frequencies follow the length of the whole prompt, beyond the trained context too."""
    rope = {"rope_type": "dynamic", "factor": 16.0, "rope_theta": 10000.0}
    tiny_checkpoint(tmp_path, "llama", rope=rope, max_position_embeddings=64, tokenizer=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    decoder = HybridDecoder.from_pretrained(tmp_path, dtype="float32")
    assert decoder.backbone.max_seq_len == 1024
    draw = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, 64, (1, PREFILL_CHUNK + 88), generator=draw)
    expected = model.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)
    for strategy in ("ar", "ngram"):
        result = decoder.generate(
            prompt[0].tolist(), max_new_tokens=8, ignore_eos=True, strategy=strategy
        )
        assert list(result.token_ids) == expected[0, prompt.shape[1] :].tolist(), strategy


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        ({"rope_type": "yarn", "factor": 4.0}, 16384),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"rope_type": "dynamic", "factor": 2.0}, 8192),
        ({"rope_type": "linear", "factor": 2.0}, 4096),
    ],
    ids=["yarn-before", "yarn-plain", "yarn-after", "dynamic", "linear"],
)
def test_the_context_is_the_one_after_scaling(rope: dict[str, Any], context: int) -> None:
    rope = {"rope_theta": 1e4, **rope}
    config = sizes("qwen2", max_position_embeddings=4096, rope_parameters=rope)
    assert spec_from_config(config).max_seq_len == context
