"""A tiny target that chains tokens, and its own answers as training data."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from hybrid import HybridDecoder
from hybrid.models.tiny import tiny_checkpoint
from hybrid.training.self_diffusion.config import SelfDiffusionConfig

VOCAB = 32


@pytest.fixture(scope="session")
def chain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without attention: each token alone decides the next, so that it can be learned."""
    folder = tmp_path_factory.mktemp("chain")
    path = tiny_checkpoint(folder, vocab_size=VOCAB, num_layers=2, tokenizer=False)
    weights = load_file(path / "model.safetensors")
    for name in weights:
        if "o_proj" in name:
            weights[name].zero_()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="session")
def chain_data(chain_model: Path) -> str:
    """What `chain_model` answers, as JSON lines."""
    last = [*range(VOCAB), *range(0, VOCAB, 2)]  # every token is answered at least once
    random.Random(0).shuffle(last)
    prompts = [[1, 2, token] for token in last]
    decoder = HybridDecoder.from_pretrained(chain_model, dtype="bfloat16")
    answers = decoder.generate(prompts, strategy="ar", max_new_tokens=20)
    pairs = zip(prompts, answers, strict=True)
    return "".join(json.dumps({"p": p, "r": a.token_ids}) + "\n" for p, a in pairs)


@pytest.fixture
def make_config(tmp_path: Path, chain_model: Path, chain_data: str) -> Callable[..., Any]:
    """A function that returns a short configuration; `lines` replaces the data."""

    def make(output: str = "run", lines: str | None = None, **fields: Any) -> SelfDiffusionConfig:
        data = tmp_path / "data.jsonl"
        data.write_text(chain_data if lines is None else lines, encoding="utf-8")
        return SelfDiffusionConfig(
            **{
                "data": data,
                "output": tmp_path / output,
                "model": str(chain_model),
                "num_draft_tokens": 4,
                "entry_layer": 1,
                "feature_layers": (0, 1),
                "rank": 4,
                "lora_alpha": 8.0,
                "steps": 10,
                "warmup_steps": 2,
                "anchors_per_sequence": 8,
                "num_eval_sequences": 4,
                "eval_every": 4,
                "learning_rate": 1e-2,
                **fields,
            }
        )

    return make
