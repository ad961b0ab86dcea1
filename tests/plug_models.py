"""Tiny random models of transformers, and calls of `generate` to hold ours against theirs."""

from __future__ import annotations

import copy
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from fakes import tiny_backbone
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hybrid.models.dflash import DFlashModel, DFlashSpec
from hybrid.models.draft_config import DraftConfig, base_shape
from hybrid.models.spec import RopeSpec
from hybrid.models.tiny import tiny_checkpoint
from hybrid.training.self_diffusion.draft_model import DraftModel
from hybrid.training.self_diffusion.export import save_adapter

PAD = 0
LENGTHS = (11, 4, 16)
# The native backbone runs the first three over the models' own tensors, the models the others.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 6},
    "gemma3_text": {"sliding_window": 6},
    "gpt2": {},
}
NATIVE = ("llama", "qwen3", "mistral")


@cache
def _model(family: str, vocab_size: int) -> PreTrainedModel:
    with tempfile.TemporaryDirectory() as folder:
        fields = {"tokenizer": False, "vocab_size": vocab_size, "num_layers": 3}
        path = tiny_checkpoint(folder, family, **fields, **FAMILIES[family])
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.generation_config.pad_token_id = PAD
    return model


def tiny_model(family: str = "llama", vocab_size: int = 64) -> PreTrainedModel:
    """Return a model of one's own, without EOS: a test may do with it what it likes."""
    return copy.deepcopy(_model(family, vocab_size))


def prompts(batch: int, vocab_size: int = 64) -> dict[str, Tensor]:
    """Return `batch` prompts that repeat themselves, padded on the left, and their mask."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for length in LENGTHS[:batch]:
        half = torch.randint(2, vocab_size, (length,), generator=generator)
        rows.append(torch.cat([half, half[: length // 2]]))
    longest = max(map(len, rows))
    ids = torch.stack([torch.cat([half.new_full((longest - len(r),), PAD), r]) for r in rows])
    mask = torch.stack([torch.arange(longest) >= longest - len(r) for r in rows]).long()
    return {"input_ids": ids, "attention_mask": mask}


def texts(inputs: dict[str, Tensor], output: Tensor) -> list[list[int]]:
    """Return prompt and answer of each row of an output, without the padding in front."""
    gaps = (inputs["attention_mask"] == 0).sum(dim=1).tolist()
    return [row[gap:] for row, gap in zip(output.tolist(), gaps, strict=True)]


def random_network(model: PreTrainedModel, mask_token_id: int = 63) -> DFlashModel:
    """Return an untrained DFlash drafter for a model of hidden size 64."""
    spec = DFlashSpec(
        block_size=5,
        mask_token_id=mask_token_id,
        target_layer_ids=(0, 1),
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        norm_eps=1e-6,
        max_seq_len=512,
        rope=RopeSpec(1e4, max_seq_len=512),
        windows=(None, 6),
        num_target_layers=model.config.num_hidden_layers,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return DFlashModel(spec).eval()


def save_random_adapter(folder: Path) -> Path:
    """Write a diffusion adapter for models of the shape of `tiny_model()`, its weights noise."""
    backbone = tiny_backbone()
    draft = DraftModel(backbone, DraftConfig(4, 1, (0, 2), 4, 6.0, base_shape(backbone)))
    with torch.no_grad():
        for value in draft.parameters():
            value.normal_(std=0.3, generator=torch.Generator().manual_seed(value.numel()))
    save_adapter(folder, draft.config, draft.adapter_tensors(), base_model="tiny")
    return folder
