"""Write an adapter folder that PEFT can read, and that `load_adapter` reads whole.

A plain adapter (`DraftConfig.is_plain`: entry at layer 0, no norms, head or vocabulary of its own)
is an ordinary PEFT adapter, and that is all it needs: stock PEFT drafts with it, gated per row as
activated LoRA (set `alora_invocation_tokens` to anything in a copy of its configuration, and pass
`alora_offsets`, how many last rows get the updates), and one that was trained on random tokens is
what SGLang's UNO serves. Any other adapter loads in PEFT but does not draft there by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from hybrid.files import replacing, write_json
from hybrid.models.draft_config import DRAFT_CONFIG, PEFT_PREFIX, DraftConfig


def save_adapter(
    folder: Path,
    config: DraftConfig,
    tensors: Mapping[str, Tensor],
    *,
    base_model: str,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write the files; each appears whole or not at all.

    A plain adapter has no `draft_model.safetensors`: servers that read every tensor file of a
    folder would trip over it.

    Args:
        folder: created if need be.
        config: shape of the adapter.
        tensors: as `DraftModel.adapter_tensors` names them.
        base_model: name for PEFT's config.
        dtype: of the tensors on disk.

    Raises:
        CheckpointError: a file cannot be written.
    """
    lora = {
        n: t.to("cpu", dtype).contiguous() for n, t in tensors.items() if n.startswith(PEFT_PREFIX)
    }
    rest = {
        n: t.to("cpu", dtype if t.is_floating_point() else t.dtype).contiguous()
        for n, t in tensors.items()
        if n not in lora
    }
    peft_config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": config.rank,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(config.targets),
        "inference_mode": True,
    }
    if config.entry_layer > 0:
        layers = range(config.entry_layer, config.base["num_layers"])
        peft_config |= {"layers_to_transform": list(layers), "layers_pattern": "layers"}
    _replace_tensors(folder / "adapter_model.safetensors", lora)
    if config.is_plain:
        (folder / "draft_model.safetensors").unlink(missing_ok=True)
    else:
        _replace_tensors(folder / "draft_model.safetensors", rest)
    write_json(folder / "adapter_config.json", peft_config)
    write_json(folder / DRAFT_CONFIG, config.to_dict())


def _replace_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    with replacing(path) as part:
        # Not save_file: its files are readable by their owner alone.
        part.write_bytes(save(dict(tensors)))
