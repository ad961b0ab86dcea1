"""The pictures of a report: curves of accuracy over TPF and time, a radar, a Pareto front."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid.eval.grid import label
from hybrid.pictures import new_figure, save_figure

Rows = Sequence[Mapping[str, Any]]

_LEAST_AXES = 3  # a radar of two tasks is a line


def plot_report(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw a document of `hybrid eval`; return the files: curves.png and, of 3 tasks, radar.png.

    Raises:
        ConfigError: matplotlib is missing.
        CheckpointError: a picture cannot be written.
    """
    rows = document["rows"]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    pictures = [save_figure(_curves(rows, tasks), folder / "curves.png")]
    if len(tasks) >= _LEAST_AXES:
        pictures.append(save_figure(_radar(rows, tasks), folder / "radar.png"))
    return pictures


def plot_front(document: Mapping[str, Any], path: Path) -> Path:
    """Draw a document of `hybrid sweep`: quality over tokens per second, front and choice.

    Raises:
        ConfigError: matplotlib is missing.
        CheckpointError: the picture cannot be written.
    """
    figure = new_figure(7, 5)
    axes = figure.subplots()
    points, chosen = document["points"], document["chosen"]
    front = sorted(
        (p for p in points if p["is_on_front"]), key=lambda point: point["tokens_per_second"]
    )
    axes.plot(*_xy(points), "o", color="C7", label="setting")
    axes.plot(*_xy(front), "o-", color="C0", label="Pareto front")
    axes.plot(*_xy([chosen]), "*", markersize=16, color="C3", label="chosen")
    if document["baseline"] is not None:
        axes.plot(*_xy([document["baseline"]]), "s", color="C2", label="ar")
    for point in front:
        text = label(point).removeprefix(point["strategy"]).strip()
        (x,), (y,) = _xy([point])
        axes.annotate(text, (x, y), fontsize="x-small", xytext=(4, 4), textcoords="offset points")
    axes.set_xlabel("tokens per second")
    axes.set_ylabel(f"{document['settings']['quality']}, %")
    axes.set_title(points[0]["strategy"])
    axes.grid(alpha=0.3)
    axes.legend()
    return save_figure(figure, path)


def _curves(rows: Rows, tasks: Sequence[str]) -> Any:
    """Return a row of panels per task: over tokens per forward, and over the time of an answer."""
    figure = new_figure(9, 2.8 * len(tasks))
    panels = figure.subplots(len(tasks), 2, squeeze=False)
    columns = (("tokens_per_forward", "tokens per forward"), ("latency_ms", "ms per answer"))
    for task, line in zip(tasks, panels, strict=True):
        own = [row for row in rows if row["task"] == task]
        for (name, title), axes in zip(columns, line, strict=True):
            for strategy in dict.fromkeys(row["strategy"] for row in rows):
                curve = sorted((r for r in own if r["strategy"] == strategy), key=lambda r: r[name])
                percent = [100 * row["accuracy"] for row in curve]
                axes.plot([row[name] for row in curve], percent, "o-", label=strategy)
            axes.set_xlabel(title)
            axes.grid(alpha=0.3)
        line[0].set_ylabel(f"{task}\naccuracy, %")
    panels[0, 0].legend(fontsize="small")
    return figure


def _radar(rows: Rows, tasks: Sequence[str]) -> Any:
    """Return one closed line per strategy and setting; an axis is a task's accuracy."""
    figure = new_figure(7, 5)
    axes = figure.subplots(subplot_kw={"projection": "polar"})
    angles = [2 * math.pi * i / len(tasks) for i in range(len(tasks))]
    accuracy = {(label(row), row["task"]): 100 * row["accuracy"] for row in rows}
    for name in dict.fromkeys(map(label, rows)):
        if all((name, task) in accuracy for task in tasks):
            values = [accuracy[name, task] for task in tasks]
            axes.plot([*angles, angles[0]], [*values, values[0]], "o-", label=name)
    axes.set_xticks(angles, tasks)
    axes.set_ylim(0, 100)
    axes.set_title("accuracy, %")
    figure.legend(fontsize="small", loc="outside right upper")
    return figure


def _xy(points: Rows) -> tuple[list[float], list[float]]:
    return [p["tokens_per_second"] for p in points], [100 * p["quality"] for p in points]
