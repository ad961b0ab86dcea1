"""What a calibration recognises a model and an adapter by, wherever their files lie."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from hybrid.protocols import Backbone

_NUM_ROWS = 64
_NUM_BYTES = 1 << 20


def model_fingerprint(backbone: Backbone, name: str) -> str:
    """Return a digest of some weights, the same in every precision; else the name.

    Args:
        backbone: the model.
        name: what it was loaded from, for models whose weights are not at hand.
    """
    parts = [getattr(backbone, field, None) for field in ("norm", "embedding")]
    if not all(isinstance(part, Tensor) for part in parts):
        return name
    digest = hashlib.sha256()
    for part in parts:
        assert isinstance(part, Tensor)
        rows = part[:_NUM_ROWS].to("cpu", torch.bfloat16).contiguous()
        digest.update(rows.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def folder_fingerprint(folder: Path) -> str:
    """Return a digest of how the files of an adapter begin, weights and configurations."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*_config.json"), *folder.glob("*.safetensors")]):
        with path.open("rb") as file:
            digest.update(path.name.encode())
            digest.update(file.read(_NUM_BYTES))
    return digest.hexdigest()[:16]
