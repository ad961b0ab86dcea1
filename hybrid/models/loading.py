"""From a name to a running model: device, precision, backbone, tokenizer, shipped adapter.

Next: hybrid/models/transformer.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hybrid.errors import CheckpointError, ConfigError, did_you_mean
from hybrid.models.adapter import DiffusionAdapter, load_adapter
from hybrid.models.checkpoint import INT4_METHOD, Checkpoint, Weight, open_checkpoint, read_json
from hybrid.models.diffusion_gemma import DiffusionGemma
from hybrid.models.families import spec_from_config, why_not_native
from hybrid.models.family_table import FAMILIES
from hybrid.models.fetch import Progress
from hybrid.models.hf import HFBackbone
from hybrid.models.lora_files import Merged, read_updates
from hybrid.models.name_maps import Renamed
from hybrid.models.store import DEFAULT_NAME, name_of, resolve
from hybrid.models.tokenizer import Tokenizer, load_tokenizer
from hybrid.models.transformer import NativeBackbone
from hybrid.types import Context

DTYPES = ("auto", "float32", "bfloat16", "int4")
DeviceMap = str | int | torch.device | Mapping[str, str | int | torch.device]
SHIPPED_ADAPTERS = {
    DEFAULT_NAME: Path(__file__).resolve().parent.parent / "adapters" / "smollm2-135m-instruct"
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A backbone and what came with it."""

    name: str
    path: Path
    backbone: NativeBackbone | HFBackbone | DiffusionGemma
    tokenizer: Tokenizer | None
    adapter: DiffusionAdapter | None


def load_model(
    model: str | Path,
    *,
    device: str = "auto",
    device_map: DeviceMap | None = None,
    dtype: str = "auto",
    adapter: str | Path | None = None,
    exact: bool = False,
    compile: bool = False,
    trainable: bool = False,
    progress: Progress | None = None,
) -> LoadedModel:
    """Fetch if need be, load, and bind the adapter.

    Args:
        model: "default", a Hugging Face folder, a GGUF file or a hub id.
        device: "auto" takes CUDA where there is any.
        device_map: transformers' word for it: "auto", or one device for the whole model.
        dtype: "auto" is a GGUF's own blocks on the CPU; else float32 where the checkpoint is
            float32 and the device a CPU, bfloat16 otherwise.
        adapter: folder of a diffusion adapter; None takes the shipped one of the default model. For
            a model with bidirectional context it is a PEFT folder of D2F, which acts in every pass
            and makes the context block-causal.
        exact: see `NativeBackbone`; other backbones refuse it.
        compile: likewise.
        trainable: keep the weights in the layout that a gradient can pass, slower on a CPU.
        progress: see `hybrid.models.store.resolve`.

    Raises:
        CheckpointError: the model or the adapter cannot be fetched, read or matched.
        ConfigError: an unknown device or dtype, one that this model cannot have, or a device map
            of several devices.
    """
    if not isinstance(model, (str, Path)):
        raise ConfigError(f"model: got {type(model).__name__}, expected a name or a path.")
    where = choose_device(device if device_map is None else _one_device(device_map, device))
    if dtype not in DTYPES:
        raise ConfigError(f"dtype: got {dtype!r}.{did_you_mean(str(dtype), DTYPES)}")
    if dtype == "int4" and where.type != "cpu":
        raise ConfigError(
            f"dtype: int4 runs on the CPU only, got device {where}. Use dtype='bfloat16'."
        )
    path = resolve(model, _precision(dtype, where), progress=progress)
    config = read_json(path / "config.json")
    tokenizer = load_tokenizer(path)
    activations = _activations(dtype, config, where)
    backbone: NativeBackbone | HFBackbone | DiffusionGemma
    reason, bound = why_not_native(config), None
    if reason is not None:
        own = {"dtype='int4'": dtype == "int4", "exact": exact, "compile": compile}
        own["adapter"] = adapter is not None
        if asked := [name for name, is_asked in own.items() if is_asked]:
            raise ConfigError(
                f"{asked[0]}: it needs a model that the native backbone runs (`hybrid list "
                f"families`), got {model}: {reason}. Leave it out."
            )
    if config.get("model_type") == "diffusion_gemma":
        backbone = DiffusionGemma.from_path(path, where, activations)
    elif reason is None:
        if dtype == "int4" and not _is_int4(config):
            raise ConfigError(
                f"dtype: int4 needs a GGUF file with Q4_1 or Q8_0 weights, got {model}. "
                "Use dtype='bfloat16' or 'float32'."
            )
        checkpoint, merged = open_checkpoint(path), None
        if adapter is not None and spec_from_config(config).context == Context.BIDIRECTIONAL:
            merged = Path(adapter)
        how = {"exact": exact, "compile": compile, "reorder": not trainable}
        backbone = _native(checkpoint, where, activations, merged, **how)
        if merged is None:
            bound = _adapter(name_of(path) or str(model), backbone, adapter)
    else:
        backbone = _foreign(path, where, activations, reason)
    return LoadedModel(str(model), path, backbone, tokenizer, bound)


def choose_device(name: str) -> torch.device:
    """Return the device; "auto" takes CUDA where there is any.

    Raises:
        ConfigError: unknown, or not on this machine.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device: got {name!r}, expected auto, cpu, cuda or cuda:N.") from error
    if device.type not in {"cpu", "cuda"}:
        raise ConfigError(f"device: got {name!r}, expected auto, cpu, cuda or cuda:N.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device: got {name!r}, but torch {torch.__version__} sees "
            f"{torch.cuda.device_count()} CUDA devices. Use device='cpu'."
        )
    return device


def _one_device(device_map: DeviceMap, device: str) -> str:
    """Return what a device map says in the words of `device`."""
    places = [*device_map.values()] if isinstance(device_map, Mapping) else [device_map]
    names = {f"cuda:{place}" if isinstance(place, int) else str(place) for place in places}
    if len(names) != 1 or names & {"balanced", "balanced_low_0", "sequential", "disk"}:
        raise ConfigError(
            f"device_map: got {device_map!r}, expected 'auto' or one device for the whole model: "
            "it is not spread over several."
        )
    (name,) = names
    if device not in {"auto", name}:
        raise ConfigError(f"device_map: got {device_map!r} beside device {device!r}; give one.")
    return name


def _precision(dtype: str, device: torch.device) -> str:
    if dtype == "auto":
        return "int4" if device.type == "cpu" else "bfloat16"
    return dtype


def _activations(dtype: str, config: dict[str, object], device: torch.device) -> torch.dtype:
    if dtype == "float32":
        return torch.float32
    if dtype in {"bfloat16", "int4"} or device.type == "cuda" or _is_int4(config):
        return torch.bfloat16
    stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return torch.float32 if stored == "float32" else torch.bfloat16


def _is_int4(config: dict[str, object]) -> bool:
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == INT4_METHOD


def _native(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    merged: Path | None,
    **how: bool,
) -> NativeBackbone:
    """Load a model; a PEFT folder is merged into its weights as they are read.

    `how` are further arguments of `NativeBackbone`.

    The one published use of such adapters for bidirectional models is D2F (arXiv:2508.09192), which
    makes them block-causal.
    """
    spec = spec_from_config(checkpoint.config)
    spec = replace(spec, eos_token_ids=checkpoint.eos_token_ids or spec.eos_token_ids)
    names = FAMILIES[spec.family].names
    weights: Mapping[str, Weight] = Renamed(checkpoint.tensors, names)
    if merged is not None:
        weights = Merged(weights, read_updates(merged, names))
        spec = replace(spec, context=Context.BLOCK_CAUSAL, default_strategy="d2f")
    return NativeBackbone(spec, weights, device=device, dtype=dtype, **how)


def _foreign(
    path: Path, device: torch.device, dtype: torch.dtype, why_not_native: str
) -> HFBackbone:
    try:
        return HFBackbone.from_path(path, device, dtype)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}\nNor does the native backbone run it ({why_not_native}). Its families: "
            f"{', '.join(FAMILIES)}."
        ) from error


def _adapter(
    model: str, backbone: NativeBackbone, adapter: str | Path | None
) -> DiffusionAdapter | None:
    path = adapter if adapter is not None else SHIPPED_ADAPTERS.get(model)
    if path is None or (adapter is None and not Path(path).is_dir()):
        return None
    return load_adapter(backbone, path)
