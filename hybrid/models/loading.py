"""From a name to a running model: device, precision, backbone, tokenizer, shipped adapter.

Next: hybrid/models/transformer.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hybrid.errors import ConfigError, did_you_mean
from hybrid.models.adapter import DiffusionAdapter, load_adapter
from hybrid.models.checkpoint import INT4_METHOD, Checkpoint, open_checkpoint, read_json
from hybrid.models.families import is_native, spec_from_config
from hybrid.models.fetch import Progress
from hybrid.models.hf import HFBackbone
from hybrid.models.store import DEFAULT_NAME, name_of, resolve
from hybrid.models.tokenizer import Tokenizer, load_tokenizer
from hybrid.models.transformer import NativeBackbone

DTYPES = ("auto", "float32", "bfloat16", "int4")
SHIPPED_ADAPTERS = {
    DEFAULT_NAME: Path(__file__).resolve().parent.parent / "adapters" / "smollm2-135m-instruct"
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A backbone and what came with it."""

    name: str
    path: Path
    backbone: NativeBackbone | HFBackbone
    tokenizer: Tokenizer | None
    adapter: DiffusionAdapter | None


def load_model(
    model: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    adapter: str | Path | None = None,
    exact: bool = False,
    trainable: bool = False,
    progress: Progress | None = None,
) -> LoadedModel:
    """Fetch if need be, load, and bind the adapter.

    Args:
        model: "default", a Hugging Face folder, a GGUF file or a hub id.
        device: "auto" takes CUDA where there is any.
        dtype: "auto" is a GGUF's own blocks on the CPU; else float32 where the checkpoint is
            float32 and the device a CPU, bfloat16 otherwise.
        adapter: folder of a diffusion adapter; None takes the shipped one of the default model.
        exact: see `NativeBackbone`; other backbones refuse it.
        trainable: keep the weights in the layout that a gradient can pass, slower on a CPU.
        progress: see `hybrid.models.store.resolve`.

    Raises:
        CheckpointError: the model or the adapter cannot be fetched, read or matched.
        ConfigError: an unknown device or dtype, or one that this model cannot have.
    """
    if not isinstance(model, (str, Path)):
        raise ConfigError(f"model: got {type(model).__name__}, expected a name or a path.")
    where = choose_device(device)
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
    backbone: NativeBackbone | HFBackbone
    if is_native(config):
        if dtype == "int4" and not _is_int4(config):
            raise ConfigError(
                f"dtype: int4 needs a GGUF file with Q4_1 or Q8_0 weights, got {model}. "
                "Use dtype='bfloat16' or 'float32'."
            )
        backbone = _native(
            open_checkpoint(path), where, activations, exact=exact, reorder=not trainable
        )
    else:
        if dtype == "int4" or exact:
            what = "dtype: int4" if dtype == "int4" else "exact: it"
            raise ConfigError(f"{what} needs a model that the native backbone runs.")
        backbone = HFBackbone.from_path(path, where, activations)
    bound = _adapter(name_of(path) or str(model), backbone, adapter)
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
    *,
    exact: bool,
    reorder: bool,
) -> NativeBackbone:
    spec = spec_from_config(checkpoint.config)
    spec = replace(spec, eos_token_ids=checkpoint.eos_token_ids or spec.eos_token_ids)
    return NativeBackbone(
        spec, checkpoint.tensors, device=device, dtype=dtype, exact=exact, reorder=reorder
    )


def _adapter(
    model: str, backbone: NativeBackbone | HFBackbone, adapter: str | Path | None
) -> DiffusionAdapter | None:
    path = adapter if adapter is not None else SHIPPED_ADAPTERS.get(model)
    if path is None or (adapter is None and not Path(path).is_dir()):
        return None
    if not isinstance(backbone, NativeBackbone):
        raise ConfigError(
            "adapter: self-diffusion needs a model that the native backbone runs "
            "(`hybrid list` shows the families). Leave the adapter out."
        )
    return load_adapter(backbone, path)
