"""Load a model of transformers' own classes: no foreign code, no pickles, no tensor missing.

Next: hybrid/models/hf.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from hybrid.errors import CheckpointError


def load_pretrained(
    class_name: str,
    path: str | Path,
    dtype: torch.dtype,
    *,
    local_files_only: bool = True,
    **options: Any,
) -> Any:
    """Return the model.

    Args:
        class_name: of transformers; not every version has every class.
        path: a folder, or a hub id.
        dtype: of the weights.
        local_files_only: never ask the hub.
        **options: more for `from_pretrained`.

    Raises:
        CheckpointError: it cannot be loaded, or lacks tensors.
    """
    try:
        model, info = getattr(transformers, class_name).from_pretrained(
            str(path),
            dtype=dtype,
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=local_files_only,
            output_loading_info=True,
            **options,
        )
    except Exception as error:  # each model class raises what it likes
        raise CheckpointError(f"transformers cannot load {path}: {error}") from error
    missing = sorted(info["missing_keys"])
    if missing:  # transformers fills them with noise and only warns
        raise CheckpointError(
            f"{path}: {len(missing)} tensors are missing, the first is {missing[0]}. "
            "Fetch the checkpoint again."
        )
    return model
