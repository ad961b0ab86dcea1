"""Curves of a run as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hybrid.errors import ConfigError
from hybrid.pictures import new_figure, save_figure
from hybrid.training.checkpoint import read_metrics

Rows = Sequence[dict[str, Any]]


def plot_metrics(folder: Path) -> Path:
    """Draw metrics.jsonl of a run: loss, learning rate, and what was measured on held-out data.

    Args:
        folder: output folder of the run.

    Returns:
        metrics.png in it.

    Raises:
        ConfigError: matplotlib is missing, or the run has no metrics yet.
        CheckpointError: the picture cannot be written.
    """
    rows = read_metrics(folder)
    if not rows:
        raise ConfigError(f"{folder} has no metrics.jsonl with steps, expected a training run.")
    measured = [draw for name, draw in _HELD_OUT.items() if any(name in row for row in rows)]
    panels = [_plot_loss, _plot_rate, *measured]
    figure = new_figure(8, 2.4 * len(panels))
    every = figure.subplots(len(panels), sharex=True)
    for axes, draw in zip(every, panels, strict=True):
        draw(axes, rows)
        axes.grid(alpha=0.3)
    every[-1].set_xlabel("step")
    return save_figure(figure, folder / "metrics.png")


def _plot_loss(axes: Any, rows: Rows) -> None:
    steps, losses = _series(rows, "loss")
    axes.plot(steps, losses, linewidth=0.5, alpha=0.4)
    axes.plot(steps, _smooth(losses), color="C0")
    axes.set_ylabel("loss")


def _plot_rate(axes: Any, rows: Rows) -> None:
    axes.plot(*_series(rows, "learning_rate"), color="C1")
    axes.set_ylabel("learning rate")


def _plot_length(axes: Any, rows: Rows) -> None:
    axes.plot(*_series(rows, "expected_acceptance_length"), marker=".", color="C2")
    axes.set_ylabel("expected\nacceptance length")


def _plot_positions(name: str, axes: Any, rows: Rows) -> None:
    from matplotlib import colormaps

    steps, shares = _series(rows, name)
    for index, line in enumerate(zip(*shares, strict=True)):
        colour = colormaps["viridis"](index / len(shares[0]))
        axes.plot(steps, line, marker=".", color=colour, label=str(index + 1))
    axes.set_ylim(0, 1)
    axes.set_ylabel(name.replace("_by_", "\nby "))
    columns = -(-len(shares[0]) // 4)
    axes.legend(title="position", fontsize="x-small", ncols=columns, loc="upper left")


_HELD_OUT: dict[str, Callable[[Any, Rows], None]] = {
    "expected_acceptance_length": _plot_length,
    "acceptance_by_position": partial(_plot_positions, "acceptance_by_position"),
    "accuracy_by_position": partial(_plot_positions, "accuracy_by_position"),
}


def _series(rows: Rows, name: str) -> tuple[list[int], list[Any]]:
    found = [row for row in rows if name in row]
    return [row["step"] for row in found], [row[name] for row in found]


def _smooth(values: Sequence[float]) -> list[float]:
    """Return the exponential mean over about a fiftieth of the run."""
    keep = 1 - 1 / max(1.0, len(values) / 50)
    smoothed, mean = [], values[0]
    for value in values:
        mean = keep * mean + (1 - keep) * value
        smoothed.append(mean)
    return smoothed
