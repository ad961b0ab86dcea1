"""Low-rank updates (LoRA, arXiv:2106.09685) in a PEFT folder, and weights that have them in.

Two uses: an update that acts in draft passes alone stays beside its layer
(hybrid/models/adapter.py), one that acts always is added to the weight as the checkpoint is read.
What this project does not compute is refused, never left out. Next: hybrid/models/loading.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hybrid.errors import CheckpointError
from hybrid.models.checkpoint import Weight, read_json
from hybrid.models.name_maps import NameMap, canonical

_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
# Options of PEFT that change what an update computes, and the values under which they do not.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),  # others change the base
    **dict.fromkeys(
        (
            "alora_invocation_tokens",
            "alpha_pattern",
            "arrow_config",
            "fan_in_fan_out",
            "layer_replication",
            "lora_bias",
            "modules_to_save",
            "target_parameters",
            "trainable_token_indices",
            "use_dora",
            "use_qalora",
        ),
        (None, False, {}, []),
    ),
}


@dataclass(frozen=True, slots=True)
class LowRank:
    """An update of a linear layer: weight + scale * b a.

    Attributes:
        a: [R, I].
        b: [O, R].
        scale: PEFT's lora_alpha / r, or lora_alpha / sqrt(r) with `use_rslora`.
    """

    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        """R."""
        return self.a.shape[0]

    def dense(self) -> Tensor:
        """Return scale * b a [O, I], float32."""
        return self.scale * (self.b.float() @ self.a.float())


def is_peft(folder: Path) -> bool:
    """Return whether a folder is PEFT's and nothing more: no draft pass is described in it."""
    ours = ("draft_config.json", "draft_model.safetensors")
    return (folder / "adapter_config.json").is_file() and not any(
        (folder / name).is_file() for name in ours
    )


def read_updates(folder: Path, names: NameMap) -> dict[str, LowRank]:
    """Read a PEFT folder.

    Args:
        folder: with adapter_config.json and adapter_model.safetensors.
        names: from the family's tensor names to canonical ones.

    Returns:
        {canonical name of a layer, without ".weight": its update}.

    Raises:
        CheckpointError: missing or damaged files, or an update that is more than a low-rank one.
    """
    config = read_json(folder / "adapter_config.json")
    try:
        tensors = load_file(folder / "adapter_model.safetensors")
        alpha, is_stabilised = float(config["lora_alpha"]), bool(config.get("use_rslora"))
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise CheckpointError(
            f"Adapter {folder} cannot be read: {type(error).__name__}: {error}. Copy it again."
        ) from error
    _refuse_more(folder, config)
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None or tensor.ndim != 2:
            raise CheckpointError(
                f"Adapter {folder}: tensor {name!r} {list(tensor.shape)}, expected matrices "
                "*.lora_A.weight and *.lora_B.weight alone. Merge the adapter with PEFT instead."
            )
        layer = canonical(f"{match[1]}.weight", names).removesuffix(".weight")
        parts.setdefault(layer, {})[match[2]] = tensor
    updates = {}
    for layer, pair in parts.items():
        if len(pair) != 2 or pair["A"].shape[0] != pair["B"].shape[1]:
            raise CheckpointError(
                f"Adapter {folder}: lora_A and lora_B of {layer} do not belong together. Copy it "
                "again."
            )
        rank = pair["A"].shape[0]
        scale = alpha / (math.sqrt(rank) if is_stabilised else rank)
        updates[layer] = LowRank(pair["A"], pair["B"], scale)
    if not updates:
        raise CheckpointError(f"Adapter {folder} holds no update. Copy it again.")
    return updates


def _refuse_more(folder: Path, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise CheckpointError(
            f"Adapter {folder}: got peft_type {config.get('peft_type')!r}, expected 'LORA'."
        )
    for option, neutral in _NEUTRAL.items():
        value = config.get(option, neutral[0])
        if value not in neutral:
            raise CheckpointError(
                f"Adapter {folder}: {option} is {value!r}, which is not computed here. Merge the "
                "adapter into its model with PEFT and load the result."
            )


class Merged(Mapping[str, Weight]):
    """The tensors of a checkpoint with updates in them; each is still read when it is taken."""

    def __init__(self, weights: Mapping[str, Weight], updates: Mapping[str, LowRank]) -> None:
        """Keep both.

        Args:
            weights: by canonical name.
            updates: of `read_updates`.

        Raises:
            CheckpointError: an update of a layer that the checkpoint does not have.
        """
        missing = [layer for layer in updates if f"{layer}.weight" not in weights]
        if missing:
            raise CheckpointError(
                f"Adapter is for another model: it updates {missing[0]}, which this checkpoint "
                "does not have. Give the adapter that was trained for it, or none."
            )
        self._weights = weights
        self._updates = {f"{layer}.weight": update for layer, update in updates.items()}

    def __getitem__(self, name: str) -> Weight:
        weight, update = self._weights[name], self._updates.get(name)
        if update is None:
            return weight
        # In float32: what follows rounds once, to the dtype that it computes in.
        whole = weight if isinstance(weight, Tensor) else weight.dequantize(torch.float32)
        delta = update.dense()
        if whole.shape != delta.shape:
            raise CheckpointError(
                f"Adapter is for another model: its update of {name} is {list(delta.shape)}, the "
                f"weight {list(whole.shape)}. Give the adapter that was trained for it, or none."
            )
        return whole.float() + delta

    def __contains__(self, name: object) -> bool:  # the inherited one would read the tensor
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
