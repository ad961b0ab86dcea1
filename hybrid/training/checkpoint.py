"""Checkpoints and metrics of a run: what lets a killed run go on as if nothing had happened."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from pydantic_core import to_jsonable_python

from hybrid.errors import CheckpointError, ConfigError
from hybrid.files import locked, replacing, write_json
from hybrid.models.fetch import DEFAULT_MODEL
from hybrid.models.store import DEFAULT_NAME, resolve
from hybrid.training.config import TrainConfig

# These change nothing about the result; the data is known by its SHA-256.
_FREE = {
    "data",
    "output",
    "device",
    "keep_contexts",
    "eval_every",
    "tensorboard",
    # How decoding is to use the result.
    "preferred_draft_tokens",
    "confidence_floor",
}
_OF_A_MODEL = {".json", ".safetensors", ".jinja", ".model", ".txt"}
_SAMPLES = 4096


def only_run_in(folder: Path) -> AbstractContextManager[None]:
    """Create the folder, and keep other trainings out of it until the block ends.

    Raises:
        ConfigError: another training runs there.
        CheckpointError: the folder cannot be created.
    """
    busy = f"another training runs in {folder}. Wait for it, or give another folder."
    return locked(folder / ".lock", folder, busy)


def model_sha256(model: str) -> str:
    """Return a fingerprint of what a model's name stands for now: a path may hold another one.

    It is made of the files' sizes and of some 4 MiB of each, spread evenly: that is quick, and yet
    every large matrix of the weights is in it. Smaller files are read whole.

    Args:
        model: as `hybrid.models.store.resolve` takes it.

    Raises:
        CheckpointError: it is not there or cannot be read.
    """
    if model == DEFAULT_NAME:
        return DEFAULT_MODEL.sha256
    path, digest = Path(model).expanduser(), hashlib.sha256()
    try:
        if path.is_file():
            files = [path]
        else:
            files = sorted(f for f in resolve(model).iterdir() if f.suffix in _OF_A_MODEL)
        for file in files:
            size = file.stat().st_size
            digest.update(f"{file.name} {size}\n".encode())
            with file.open("rb") as content:
                for offset in range(0, size, max(size // _SAMPLES, 1024)):
                    content.seek(offset)
                    digest.update(content.read(1024))
    except OSError as error:
        raise CheckpointError(
            f"{model} cannot be read: {error}. Put the model back, and run the same command again."
        ) from error
    return digest.hexdigest()


def save_checkpoint(config: TrainConfig, hashes: Mapping[str, str], state: dict[str, Any]) -> None:
    """Write `state` ("step", "model", "optimizer") to the run's folder.

    Args:
        config: of the run.
        hashes: "data_sha256" and "model_sha256", of what the run is made from.
        state: what to go on with.

    Raises:
        CheckpointError: it cannot be written; the checkpoint before it is intact.
    """
    values = config.model_dump(mode="json")
    known = {"recipe": type(config).__name__, "config": values}
    with replacing(config.output / "checkpoint.pt") as part:
        torch.save({**state, **known, **hashes}, part)
    write_json(config.output / "config.json", values)


def load_checkpoint(config: TrainConfig, hashes: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the last state that was saved, or None where there is none; see `save_checkpoint`.

    Raises:
        ConfigError: the folder holds a run of another configuration, or of another model or other
            data by the same name.
        CheckpointError: the checkpoint is damaged.
    """
    path = config.output / "checkpoint.pt"
    if not path.is_file():
        return None
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
        saved = dict(state["config"])
        missing = {"step", "model", "optimizer"} - set(state)
    except Exception as error:
        raise _damaged(path, error) from error
    if missing:
        raise _damaged(path, f"it has no {', '.join(sorted(missing))}")
    recipe = state.get("recipe", type(config).__name__)
    if recipe != type(config).__name__:
        raise ConfigError(
            f"output: {config.output} holds a run of another recipe ({recipe}, now "
            f"{type(config).__name__}). Give another folder."
        )
    current = config.model_dump(mode="json")
    saved = {**_defaults(config), **saved}
    differs = [k for k in current if k not in _FREE and saved[k] != current[k]]
    if differs:
        listed = ", ".join(f"{k} ({saved[k]}, now {current[k]})" for k in differs)
        raise ConfigError(
            f"output: {config.output} holds a run with another {listed}. "
            "Give another folder, or the same values to resume."
        )
    _check_hashes(config, state, hashes)
    return state


def _check_hashes(config: TrainConfig, state: dict[str, Any], hashes: Mapping[str, str]) -> None:
    # The model first: a recipe may make its data with it.
    known = {"model": config.model, "data": f"{config.data}, or what was made from it,"}
    for field, what in known.items():
        found = hashes[f"{field}_sha256"]
        if state.get(f"{field}_sha256", found) != found:  # older checkpoints know less
            raise ConfigError(
                f"{field}: {what} has changed since the run in {config.output} began. "
                f"Give another output folder, or the same {field} to resume."
            )


def _defaults(config: TrainConfig) -> dict[str, Any]:
    """Return what a checkpoint would hold of fields that are newer than it is."""
    fields = type(config).model_fields.items()
    known = {k: f.get_default(call_default_factory=True) for k, f in fields if not f.is_required()}
    return {**dict.fromkeys(type(config).model_fields), **dict(to_jsonable_python(known))}


def _damaged(path: Path, error: object) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read: {error}. Remove it to start over.")


class MetricsLog:
    """metrics.jsonl, and TensorBoard's files if they are wanted."""

    def __init__(self, config: TrainConfig, step: int) -> None:
        """Go on after `step`; what was written of later ones is dropped.

        Raises:
            ConfigError: TensorBoard is wanted and not installed.
            CheckpointError: the folder is not writable.
        """
        self._folder = config.output
        self._writer: Any = None
        if config.tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ConfigError(
                    "tensorboard: the package is not installed: pip install "
                    "'hybrid-decoder[tensorboard]', or leave tensorboard out."
                ) from error
            folder = str(config.output / "tensorboard")
            self._writer = SummaryWriter(folder, purge_step=step + 1)
        self._started = time.perf_counter() - _forget_after(config.output, step)

    def append(self, step: int, row: dict[str, Any]) -> dict[str, Any]:
        """Write the metrics of `step`; return them with its number and the seconds so far.

        Raises:
            CheckpointError: metrics.jsonl cannot be written.
        """
        seconds = round(time.perf_counter() - self._started, 2)  # over all runs that took part
        written = {**row, "step": step, "seconds": seconds}
        _append(self._folder, written)
        if self._writer is not None:
            for name, value in row.items():
                for index, number in enumerate(value if isinstance(value, list) else [value]):
                    tag = f"{name}/{index + 1}" if isinstance(value, list) else name
                    if isinstance(number, (int, float)):
                        self._writer.add_scalar(tag, number, step)
        return written

    def close(self) -> None:
        """Let TensorBoard write what it holds back."""
        if self._writer is not None:
            self._writer.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl; a line that a kill cut short is left out."""
    path = folder / "metrics.jsonl"
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            rows.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            continue
    return rows


def last_evaluation(folder: Path, name: str) -> dict[str, Any]:
    """Return the last row of metrics.jsonl that has `name`, or an empty one."""
    rows = [row for row in read_metrics(folder) if name in row]
    return rows[-1] if rows else {}


def _append(folder: Path, row: dict[str, Any]) -> None:
    path = folder / "metrics.jsonl"
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written: {error}. Free some space or mend the folder; the same "
            "command goes on from the last checkpoint."
        ) from error


def _forget_after(folder: Path, step: int) -> float:
    """Drop the rows of steps that will run again; return the seconds spent until `step`."""
    kept = [row for row in read_metrics(folder) if row["step"] <= step]
    with replacing(folder / "metrics.jsonl") as part:
        part.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    return float(kept[-1]["seconds"]) if kept else 0.0
