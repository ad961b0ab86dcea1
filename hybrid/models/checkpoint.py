"""Read a local checkpoint: a Hugging Face folder with safetensors, tensors loaded on first use.

Only JSON and safetensors are read; code that a checkpoint brings (``auto_map``) is never run.
It does not know model families. Next: hybrid/models/families.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid.errors import CheckpointError
from hybrid.models.tensor_files import TensorFile

INT4_GROUP = 32
INT4_METHOD = "hybrid-q4_1"
"""`quantization_config.quant_method` of a folder that holds `Int4Blocks`; transformers does not
know it and says so when it is handed such a folder by mistake."""

_INT4_PARTS = ("q4", "d", "m")
_INT8_PARTS = ("q8", "d")


_ROUNDS = 5  # of least squares: they take a seventh off the squared error, more add nothing


@dataclass(frozen=True, eq=False)
class Int4Blocks:
    """A linear layer's weight as GGUF Q4_1 blocks: weight[o, i] = q[o, i] * d + m.

    `d` and `m` belong to the block i // 32 of row o. The numbers are those of the file; only the
    nibbles are re-ordered.

    Attributes:
        quants: [O, I/2] uint8; the low nibble is the even column, the high nibble the odd one.
        d: [O, I/32] float16, step of the block.
        m: [O, I/32] float16, smallest value of the block.
    """

    quants: Tensor
    d: Tensor
    m: Tensor

    def __post_init__(self) -> None:
        """Check that the three parts belong together.

        Raises:
            CheckpointError: shapes or dtypes do not fit.
        """
        rows, half = self.quants.shape if self.quants.dim() == 2 else (-1, -1)
        blocks = (rows, 2 * half // INT4_GROUP)
        fits = 2 * half % INT4_GROUP == 0 and tuple(self.d.shape) == tuple(self.m.shape) == blocks
        dtypes = (self.quants.dtype, self.d.dtype, self.m.dtype)
        if not fits or dtypes != (torch.uint8, torch.float16, torch.float16):
            got = ", ".join(f"{t.dtype} {list(t.shape)}" for t in (self.quants, self.d, self.m))
            raise CheckpointError(
                f"4-bit weight: got {got}; expected uint8 [O, I/2] and twice float16 [O, I/32]. "
                "The checkpoint is damaged: remove it and pull it again."
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Shape [O, I] of the weight."""
        return self.quants.shape[0], 2 * self.quants.shape[1]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [O, I], computed in float32 and rounded once to `dtype`."""
        rows, columns = self.shape
        levels = torch.stack((self.quants & 15, self.quants >> 4), dim=-1)  # [O, I/2, 2]
        grouped = levels.reshape(rows, columns // INT4_GROUP, INT4_GROUP).float()
        weight = grouped * self.d.float().unsqueeze(-1) + self.m.float().unsqueeze(-1)
        return weight.reshape(rows, columns).to(dtype)

    @classmethod
    def quantize(cls, weight: Tensor) -> Int4Blocks:
        """Return blocks near `weight` [O, I].

        16 even steps from smallest to largest, then a few rounds of least squares: levels for the
        steps, steps for the levels, each round no worse than the one before but for float16.
        """
        grouped = weight.float().view(len(weight), -1, INT4_GROUP)
        low, high = grouped.aminmax(dim=-1, keepdim=True)
        d, m = (high - low) / 15, low
        mean = grouped.mean(dim=-1, keepdim=True)
        for _ in range(_ROUNDS):
            levels = _levels(grouped, d, m)
            centred = levels - levels.mean(dim=-1, keepdim=True)
            spread = (centred * centred).sum(dim=-1, keepdim=True)
            fitted = (centred * (grouped - mean)).sum(dim=-1, keepdim=True) / spread
            d = torch.where(spread > 0, fitted, d)  # a block without a range keeps its step of 0
            m = mean - d * levels.mean(dim=-1, keepdim=True)
        d, m = d.half(), m.half()
        levels = _levels(grouped, d.float(), m.float()).to(torch.uint8).flatten(1)
        return cls(levels[:, ::2] | (levels[:, 1::2] << 4), d.squeeze(-1), m.squeeze(-1))


def _levels(grouped: Tensor, d: Tensor, m: Tensor) -> Tensor:
    return ((grouped - m) / d.clamp(min=1e-8)).round().clamp(0, 15)


@dataclass(frozen=True, eq=False)
class Int8Blocks:
    """A weight as GGUF Q8_0 blocks: weight[o, i] = q[o, i] * d, d of the block i // 32 of row o.

    Attributes:
        quants: [O, I] int8.
        d: [O, I/32] float16, step of the block.
    """

    quants: Tensor
    d: Tensor

    def __post_init__(self) -> None:
        """Check that the two parts belong together.

        Raises:
            CheckpointError: shapes or dtypes do not fit.
        """
        rows, columns = self.quants.shape if self.quants.dim() == 2 else (-1, -1)
        fits = columns % INT4_GROUP == 0 and tuple(self.d.shape) == (rows, columns // INT4_GROUP)
        if not fits or (self.quants.dtype, self.d.dtype) != (torch.int8, torch.float16):
            got = ", ".join(f"{t.dtype} {list(t.shape)}" for t in (self.quants, self.d))
            raise CheckpointError(
                f"8-bit weight: got {got}; expected int8 [O, I] and float16 [O, I/32]. "
                "The checkpoint is damaged: remove it and pull it again."
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Shape [O, I] of the weight."""
        return self.quants.shape[0], self.quants.shape[1]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [O, I], computed in float32 and rounded once to `dtype`."""
        grouped = self.quants.view(self.shape[0], -1, INT4_GROUP).float()
        return (grouped * self.d.float().unsqueeze(-1)).view(self.shape).to(dtype)


Weight = Tensor | Int4Blocks | Int8Blocks


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model on disk.

    Attributes:
        path: the folder, or the GGUF file.
        config: contents of config.json, under transformers' names.
        tensors: weights under transformers' names, each loaded when it is asked for.
        generation_config: contents of generation_config.json, or empty.
    """

    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, Weight]
    generation_config: dict[str, Any] = field(default_factory=dict)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a generation; those of generation_config.json where it has any."""
        return eos_token_ids(self.generation_config, self.config)


def eos_token_ids(*sources: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the EOS ids, one or several, of the first source that names any."""
    for source in sources:
        value = source.get("eos_token_id")
        if value is not None:
            return token_ids(value)
    return ()


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Return a config's id, list of ids or null as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a local Hugging Face folder; weights stay on disk until they are asked for.

    Args:
        path: folder with config.json and model.safetensors (or its sharded index).

    Raises:
        CheckpointError: the folder, its config or its weights are missing, damaged or of a
            quantisation that this project does not read.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(
            f"Checkpoint {folder}: no such folder. Expected a folder with config.json and "
            "model.safetensors; check the path or give a model name (`hybrid models list`)."
        )
    config = read_json(folder / "config.json")
    _check_quantization(folder, config)
    generation = folder / "generation_config.json"
    return Checkpoint(
        path=folder,
        config=config,
        tensors=_SafetensorsFolder(folder, _weight_files(folder)),
        generation_config=read_json(generation) if generation.is_file() else {},
    )


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        CheckpointError: the file is missing or is not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"Checkpoint {path.parent} has no {path.name}. Expected a Hugging Face folder; "
            "copy or download it again."
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}. Fetch it again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path}: got a JSON {type(value).__name__}, expected an object. Fetch it again."
        )
    return value


def refuse_foreign_code(config: Any, where: Path) -> None:
    """Refuse a config that names code for transformers to fetch from a hub and run.

    `attn_implementation: "org/repo"` and its relatives do, at any depth.

    Raises:
        CheckpointError: it does.
    """
    items = config.items() if isinstance(config, dict) else enumerate(config)
    for key, value in items:
        if isinstance(value, (dict, list)):
            refuse_foreign_code(value, where)
        elif str(key).endswith("_implementation") and "/" in str(value):
            raise CheckpointError(
                f"{where}: {key} is {value!r}, code from a hub, which is never run here. "
                f"Remove {key} from the file if you trust the rest."
            )


def _check_quantization(folder: Path, config: Mapping[str, Any]) -> None:
    quantization = config.get("quantization_config")
    if not quantization:
        return
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method != INT4_METHOD:
        raise CheckpointError(
            f"Checkpoint {folder} is quantised with {method!r}, which is not read here. "
            "Expected plain weights: use the unquantised model or a GGUF file."
        )


def _weight_files(folder: Path) -> tuple[str, ...]:
    """Names of the safetensors files, single or by the sharded index."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return ("model.safetensors",)
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if isinstance(weight_map, dict) and weight_map:
            files = sorted({str(name) for name in weight_map.values()})
            # A shard outside the folder is no honest checkpoint's.
            if all(Path(name).name == name for name in files):
                return tuple(files)
        raise CheckpointError(
            f"{index}: expected `weight_map` with names of files beside it. Fetch it again."
        )
    if any(folder.glob("*.bin")):
        raise CheckpointError(
            f"Checkpoint {folder} has pickled weights (.bin), which can carry code. Expected "
            "safetensors: load it with transformers and save it with `save_pretrained`."
        )
    raise CheckpointError(
        f"Checkpoint {folder} has no model.safetensors and no index of shards. Fetch it again."
    )


class _SafetensorsFolder(Mapping[str, Weight]):
    """The tensors of one or several memory-mapped safetensors files."""

    def __init__(self, folder: Path, files: tuple[str, ...]) -> None:
        self._parts: dict[str, TensorFile] = {}  # name on disk -> its file
        for name in files:
            file = TensorFile(folder / name)
            self._parts.update(dict.fromkeys(file.names(), file))
        # In order of the files, each weight in blocks once, under its own name.
        self._names = dict.fromkeys(_whole_name(part) for part in self._parts)

    def __getitem__(self, name: str) -> Weight:
        if name not in self._names:
            raise KeyError(name)
        if name in self._parts:
            return self._load(name)
        if f"{name}.q8" in self._parts:
            return Int8Blocks(*(self._load(f"{name}.{part}") for part in _INT8_PARTS))
        return Int4Blocks(*(self._load(f"{name}.{part}") for part in _INT4_PARTS))

    def __contains__(self, name: object) -> bool:  # the inherited one would read the tensor
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _load(self, part: str) -> Tensor:
        if part not in self._parts:
            raise CheckpointError(
                f"Weight in blocks without its part {part!r}: pull the model again."
            )
        return self._parts[part].take(part)


def _whole_name(part: str) -> str:
    name, _, suffix = part.rpartition(".")
    return name if suffix in {*_INT4_PARTS, *_INT8_PARTS} else part
