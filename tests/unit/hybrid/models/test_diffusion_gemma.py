"""DiffusionGemma's canvases are those of transformers' own generate, one at a time."""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers.models.diffusion_gemma")
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

from hybrid import HybridDecoder, Strategy
from hybrid.errors import CheckpointError, ConfigError
from hybrid.models.diffusion_gemma import CanvasSettings, DiffusionGemma

TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    "max_position_embeddings": 256,
    "sliding_window": 16,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
    "eos_token_id": 1,
    "layer_types": ["sliding_attention", "full_attention"],
}
VISION = {"model_type": "gemma4_vision", "hidden_size": 16, "intermediate_size": 16}
VISION |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
PROMPT = [5, 6, 7, 40, 3]
SETTINGS = CanvasSettings(max_denoising_steps=6)


@cache
def transformers_model() -> Any:
    config = DiffusionGemmaConfig(
        text_config=dict(TEXT),
        vision_config={**VISION, "head_dim": 8},
        canvas_length=8,
        image_token_id=60,
        boi_token_id=61,
        eoi_token_id=62,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = DiffusionGemmaForBlockDiffusion(config).eval()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim > 1:
                    weight.normal_(0, 0.3)
    return model


def ours(count: int, settings: CanvasSettings = SETTINGS, seed: int = 3) -> list[Any]:
    model = DiffusionGemma(transformers_model())
    return list(itertools.islice(model.canvases(PROMPT, settings, seed), count))


def theirs(num_tokens: int, seed: int = 3, **options: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers_model().generate(
            torch.tensor([PROMPT]), max_new_tokens=num_tokens, eos_token_id=None, **options
        )


@pytest.mark.parametrize("seed", [3, 4])
def test_canvases_are_those_of_one_call(seed: int) -> None:
    canvases = ours(3, seed=seed)
    out = theirs(24, seed, max_denoising_steps=6)
    assert [t for c in canvases for t in c.tokens] == out.sequences[0, len(PROMPT) :].tolist()
    num_steps = sum(c.num_steps for c in canvases)
    assert float(out.tokens_per_forward) == pytest.approx(24 / num_steps)
    assert all(1 <= c.num_steps <= 6 for c in canvases)


def test_seeds_differ_and_the_global_stream_is_left_alone() -> None:
    state = torch.get_rng_state()
    first, again, other = ours(1), ours(1), ours(1, seed=9)
    assert first == again
    assert first != other
    assert torch.equal(torch.get_rng_state(), state)


def test_two_answers_may_be_read_in_turn() -> None:
    model = DiffusionGemma(transformers_model())
    rows = [model.canvases(PROMPT, SETTINGS, 3), model.canvases(PROMPT[::-1], SETTINGS, 4)]
    mixed = [[next(row) for row in rows] for _ in range(2)]
    assert [pair[0] for pair in mixed] == ours(2)


def test_settings_reach_the_model() -> None:
    patient = ours(1, CanvasSettings(max_denoising_steps=9, confidence_threshold=1e-6))
    hasty = CanvasSettings(
        max_denoising_steps=9, confidence_threshold=9.0, stability_threshold=0, entropy_bound=50.0
    )
    assert ours(1, hasty)[0].num_steps < patient[0].num_steps == 9, "nothing keeps it waiting"
    assert hasty.options()["sampler_config"].entropy_bound == 50.0
    assert CanvasSettings().options() == {}
    cold = ours(1, CanvasSettings(max_denoising_steps=6, t_max=0.02, t_min=0.01))
    assert cold[0].tokens != ours(1)[0].tokens


@pytest.mark.parametrize(
    "fields",
    [{"max_denoising_steps": 0}, {"entropy_bound": -1}, {"t_min": 0}, {"temperature": 1}],
)
def test_nonsense_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CanvasSettings(**fields)


def test_from_a_folder(tmp_path: Path) -> None:
    transformers_model().save_pretrained(tmp_path)
    model = DiffusionGemma.from_path(tmp_path, torch.device("cpu"), torch.float32)
    assert (model.canvas_length, model.vocab_size, model.max_seq_len) == (8, 64, 256)
    assert model.eos_token_ids == (1,)
    assert (model.dtype, model.device) == (torch.float32, torch.device("cpu"))
    assert model.weight_nbytes > 0
    assert list(itertools.islice(model.canvases(PROMPT, SETTINGS, 3), 2)) == ours(2)


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    transformers_model().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = next(n for n in tensors if n.endswith("self_conditioning.gate_proj.weight"))
    save_file({n: t for n, t in tensors.items() if n != name}, path, metadata={"format": "pt"})
    where = (torch.device("cpu"), torch.float32)
    with pytest.raises(CheckpointError, match="1 tensors are missing, the first is .*gate_proj"):
        DiffusionGemma.from_path(tmp_path, *where)
    config = tmp_path / "config.json"
    raw = json.loads(config.read_text())
    config.write_text(json.dumps({**raw, "attn_implementation": "somebody/kernel"}))
    with pytest.raises(CheckpointError, match="never run here"):
        DiffusionGemma.from_path(tmp_path, *where)
    config.write_text(json.dumps(raw))
    path.unlink()
    with pytest.raises(CheckpointError, match="transformers cannot load"):
        DiffusionGemma.from_path(tmp_path, *where)


def test_behind_the_facade(tmp_path: Path) -> None:
    transformers_model().save_pretrained(tmp_path)
    decoder = HybridDecoder.from_pretrained(tmp_path, dtype="float32")
    assert decoder.strategies == ("diffusion-gemma",)
    strategy = Strategy.preset("diffusion-gemma", max_denoising_steps=6)
    asked: dict[str, Any] = {"strategy": strategy, "max_new_tokens": 11, "ignore_eos": True}
    result = decoder.generate(PROMPT, seed=3, **asked)
    expected = [token for canvas in ours(2) for token in canvas.tokens][:11]
    assert list(result.token_ids) == expected
    stats = result.stats
    assert stats.num_forwards == stats.num_denoise_forwards + stats.num_verify_forwards
    both = decoder.generate([PROMPT, PROMPT[:2]], seed=3, **asked)
    assert both[0].token_ids == result.token_ids
    events = list(decoder.stream(PROMPT, seed=3, **asked))
    assert events[-1].result is not None
    assert events[-1].result.token_ids == result.token_ids


@pytest.mark.parametrize(
    "fields", [{"temperature": 1.5}, {"top_k": 3}, {"min_new_tokens": 2}, {"logprobs": 1}]
)
def test_what_its_own_code_does_not_heed_is_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    transformers_model().save_pretrained(tmp_path)
    decoder = HybridDecoder.from_pretrained(tmp_path, dtype="float32")
    with pytest.raises(ConfigError, match=f"got {next(iter(fields))}, expected the default"):
        decoder.generate(PROMPT, max_new_tokens=9, **fields)
    with pytest.raises(ConfigError, match="decodes by its own code"):
        decoder.generate(PROMPT, strategy="ar")
    with pytest.raises(ConfigError, match="plan_memory"):
        decoder.plan_memory()
