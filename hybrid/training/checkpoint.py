"""Checkpoints and metrics of a run: what lets a killed run go on as if nothing had happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from hybrid.errors import CheckpointError, ConfigError
from hybrid.training.config import SelfDiffusionConfig
from hybrid.training.files import replacing, write_json

# These change nothing about the result; the data is known by its SHA-256.
_FREE = {"data", "output", "device", "keep_contexts", "eval_every"}


def save_checkpoint(config: SelfDiffusionConfig, data_sha256: str, state: dict[str, Any]) -> None:
    """Write `state` ("step", "model", "optimizer") to the run's folder.

    Raises:
        CheckpointError: it cannot be written; the checkpoint before it is intact.
    """
    values = config.model_dump(mode="json")
    with replacing(config.output / "checkpoint.pt") as part:
        torch.save({**state, "config": values, "data_sha256": data_sha256}, part)
    write_json(config.output / "config.json", values)


def load_checkpoint(config: SelfDiffusionConfig, data_sha256: str) -> dict[str, Any] | None:
    """Return the last state that was saved, or None where there is none.

    Raises:
        ConfigError: the folder holds a run of another configuration or of other data.
        CheckpointError: the checkpoint is damaged.
    """
    path = config.output / "checkpoint.pt"
    if not path.is_file():
        return None
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
        saved, sha256 = dict(state["config"]), state.get("data_sha256", data_sha256)
        missing = {"step", "model", "optimizer"} - set(state)
    except Exception as error:
        raise _damaged(path, error) from error
    if missing:
        raise _damaged(path, f"it has no {', '.join(sorted(missing))}")
    # Fields that are newer than the checkpoint have their defaults.
    current = config.model_dump(mode="json")
    defaults = SelfDiffusionConfig(data=config.data, output=config.output).model_dump(mode="json")
    differs = [k for k in current if k not in _FREE and saved.get(k, defaults[k]) != current[k]]
    if differs:
        listed = ", ".join(f"{k} ({saved.get(k, defaults[k])}, now {current[k]})" for k in differs)
        raise ConfigError(
            f"output: {config.output} holds a run with another {listed}. "
            "Give another folder, or the same values to resume."
        )
    if sha256 != data_sha256:
        raise ConfigError(
            f"data: {config.data} has changed since the run in {config.output} began. "
            "Give another output folder, or the same data to resume."
        )
    return state


def _damaged(path: Path, error: object) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read: {error}. Remove it to start over.")


def append_metrics(folder: Path, row: dict[str, Any]) -> None:
    """Add a line to metrics.jsonl.

    Raises:
        CheckpointError: it cannot be written.
    """
    path = folder / "metrics.jsonl"
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written: {error}. Free some space or mend the folder; the same "
            "command goes on from the last checkpoint."
        ) from error


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


def forget_metrics_after(folder: Path, step: int) -> float:
    """Drop the rows of steps that will run again; return the seconds spent until `step`."""
    kept = [row for row in read_metrics(folder) if row["step"] <= step]
    with replacing(folder / "metrics.jsonl") as part:
        part.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    return float(kept[-1]["seconds"]) if kept else 0.0
