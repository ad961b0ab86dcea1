"""The layouts of a DFlash drafter that other engines prefer to the public one.

The public one, which vLLM and SGLang load, is what training writes. All hold the same numbers, and
`hybrid/models/dflash_files.py` reads them all. Next: hybrid/export/export.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from hybrid.errors import ConfigError
from hybrid.files import replacing, write_json
from hybrid.models.dflash import DFlashModel, DFlashSpec
from hybrid.models.dflash_files import dflash_config, save_dflash

# What speculators says outside the shape of the layers.
_OUTSIDE = {"architectures", "block_size", "num_target_layers", "dflash_config", "dtype"}
_TRANSFORMERS_NAMES = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}


def save_transformers(folder: Path, model: DFlashModel, dtype: torch.dtype) -> None:
    """Write what transformers' own class loads (`muse_glimmer_assistant`).

    Raises:
        ConfigError: the drafter has biases, which that class does not.
        CheckpointError: a file cannot be written.
    """
    if model.spec.bias:
        raise ConfigError(
            "The drafter has attention biases, which transformers' own class does not compute, "
            "expected none. Load the drafter's folder with hybrid.plug instead."
        )
    tensors = {}
    for name, value in model.state_dict().items():
        ours = next((prefix for prefix in _TRANSFORMERS_NAMES if name.startswith(prefix)), "")
        theirs = _TRANSFORMERS_NAMES.get(ours, "") + name.removeprefix(ours)
        tensors[theirs] = value.detach().to("cpu", dtype).contiguous()
    with replacing(folder / "model.safetensors") as part:
        part.write_bytes(save(tensors, metadata={"format": "pt"}))
    write_json(folder / "config.json", _transformers_config(model.spec, dtype))


def save_speculators(folder: Path, model: DFlashModel, dtype: torch.dtype, target: str) -> None:
    """Write what speculators calls a speculator; it names its target, so vLLM needs nothing else.

    Args:
        folder: created if need be.
        model: the drafter.
        dtype: of the tensors on disk.
        target: folder or hub id.

    Raises:
        CheckpointError: a file cannot be written.
    """
    save_dflash(folder, model, dtype)
    write_json(folder / "config.json", _speculators_config(model.spec, dtype, target))


def _transformers_config(spec: DFlashSpec, dtype: torch.dtype) -> dict[str, Any]:
    public = dflash_config(spec, dtype)
    window = public["sliding_window"]
    dropped = ("rope_theta", "rope_scaling", "use_sliding_window", "max_window_layers", "use_cache")
    kept = {name: value for name, value in public.items() if name not in dropped}
    return {
        **kept,
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
        "mask_token_id": spec.mask_token_id,
        "target_layer_ids": list(spec.target_layer_ids),
        "rope_parameters": {
            "rope_type": spec.rope.kind,
            "rope_theta": spec.rope.theta,
            **spec.rope.params,
        },
        # A distance there, a number of tokens elsewhere. Without windows it has no effect.
        "sliding_window": spec.max_seq_len if window is None else window - 1,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _speculators_config(spec: DFlashSpec, dtype: torch.dtype, target: str) -> dict[str, Any]:
    public = dflash_config(spec, dtype)
    count = spec.block_size - 1
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "transformer_layer_config": {k: v for k, v in public.items() if k not in _OUTSIDE},
        "draft_vocab_size": spec.vocab_size,
        "block_size": spec.block_size,
        # It counts the embedding as layer 0.
        "aux_hidden_state_layer_ids": [i + 1 for i in spec.target_layer_ids],
        "mask_token_id": spec.mask_token_id,
        # False makes vLLM's blocks causal in every layer, sliding or not, and less is accepted.
        "sliding_window_non_causal": True,
        "sample_from_anchor": False,
        "dtype": public["dtype"],
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": count}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target, "architectures": []},
        },
    }
