"""Write an adapter folder that PEFT can read, and that `load_adapter` reads whole."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from hybrid.models.adapter import ATTENTION, MLP, PEFT_PREFIX, DraftConfig


def save_adapter(
    folder: Path,
    config: DraftConfig,
    tensors: Mapping[str, Tensor],
    *,
    base_model: str,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write the four files; each appears whole or not at all.

    Args:
        folder: created if need be.
        config: shape of the adapter.
        tensors: as `DraftModel.adapter_tensors` names them.
        base_model: name for PEFT's config.
        dtype: of the tensors on disk.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lora = {n: t.to(dtype).contiguous() for n, t in tensors.items() if n.startswith(PEFT_PREFIX)}
    rest = {n: t.to(dtype).contiguous() for n, t in tensors.items() if n not in lora}
    num_layers = config.base["num_layers"]
    peft_config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": config.rank,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [*ATTENTION, *MLP],
        "layers_to_transform": list(range(config.entry_layer, num_layers)),
        "layers_pattern": "layers",
        "inference_mode": True,
    }
    _replace_tensors(folder / "adapter_model.safetensors", lora)
    _replace_tensors(folder / "draft_model.safetensors", rest)
    write_json(folder / "adapter_config.json", peft_config)
    write_json(folder / "draft_config.json", config.to_dict())


def write_json(path: Path, value: object) -> None:
    """Write JSON so that a reader sees the old file or the new one."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(part, path)


def _replace_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    part = path.with_suffix(".part")
    save_file(dict(tensors), part)
    os.replace(part, path)
