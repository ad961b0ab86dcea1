"""Pictures of results. matplotlib is optional, and a picture appears whole or not at all."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hybrid.errors import ConfigError
from hybrid.files import replacing


def is_available() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of so many inches; no pyplot, which keeps global state.

    Raises:
        ConfigError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "Plots need matplotlib, which is not installed: pip install 'hybrid-decoder[plot]'"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> Path:
    """Write a figure as PNG; return its path.

    Raises:
        CheckpointError: the file cannot be written; what was there before is intact.
    """
    with replacing(path) as part:
        figure.savefig(part, format="png", dpi=120)
    return path
