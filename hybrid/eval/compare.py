"""Whether a new report is worse than an old one: the gate of `hybrid eval --compare`.

Accuracy drops by its difference, TPF by its share. Times are not compared: they vary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hybrid.bench.tables import NOTHING, TextTable
from hybrid.errors import ConfigError
from hybrid.eval.grid import label

_NEEDED = ("task", "strategy", "parameters", "digest", "accuracy", "tokens_per_forward")
_ROUNDING = 1e-9  # 0.9 - 0.89 is more than 0.01


class Drop(NamedTuple):
    """What got worse, or cannot be compared.

    Attributes:
        task: of the row.
        strategy: with its parameters.
        number: "accuracy", "TPF", or what is wrong with the row.
        old: before; None where the row itself is the problem.
        new: now.
    """

    task: str
    strategy: str
    number: str
    old: float | None = None
    new: float | None = None


def compare(old: Mapping[str, Any], new: Mapping[str, Any], max_drop: float) -> list[Drop]:
    """Return what got worse by more than `max_drop`; rows that only the new report has are fine.

    A row that the new report lacks counts, and so does one of other questions: their accuracies
    say nothing about each other.

    Args:
        old: a report.
        new: another one.
        max_drop: 0.01 is one percent point of accuracy, or one percent of TPF.
    """
    found = []
    rows = {(row["task"], label(_sorted(row))): row for row in new["rows"]}
    for before in old["rows"]:
        task, strategy = before["task"], label(_sorted(before))
        now = rows.get((task, strategy))
        if now is None:
            found.append(Drop(task, strategy, "missing"))
        elif now["digest"] != before["digest"]:
            found.append(Drop(task, strategy, "other questions"))
        else:
            accuracy = before["accuracy"], now["accuracy"]
            if accuracy[0] - accuracy[1] > max_drop + _ROUNDING:
                found.append(Drop(task, strategy, "accuracy", *accuracy))
            tpf = before["tokens_per_forward"], now["tokens_per_forward"]
            if tpf[0] - tpf[1] > max_drop * tpf[0] + _ROUNDING:
                found.append(Drop(task, strategy, "TPF", *tpf))
    return found


def table_of(drops: list[Drop], max_drop: float) -> TextTable:
    """Return the table of what got worse."""
    lines = tuple(
        (
            drop.strategy,
            drop.task,
            drop.number,
            NOTHING if drop.old is None else f"{drop.old:.4g}",
            NOTHING if drop.new is None else f"{drop.new:.4g}",
        )
        for drop in drops
    )
    columns = ("strategy", "task", "number", "old", "new")
    return TextTable(f"Dropped by more than {max_drop:g}", columns, lines)


def read_report(path: Path) -> dict[str, Any]:
    """Return a report that `hybrid eval` wrote.

    Raises:
        ConfigError: there is none, or it is something else.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"compare: {path} cannot be read: {error}") from error
    rows = document.get("rows") if isinstance(document, dict) else None
    is_report = isinstance(rows, list) and all(
        isinstance(row, dict) and set(_NEEDED) <= set(row) for row in rows
    )
    if not is_report:
        raise ConfigError(f"compare: {path} is no report, expected report.json of `hybrid eval`.")
    return document


def _sorted(row: Mapping[str, Any]) -> dict[str, Any]:
    parameters = dict(sorted(row["parameters"].items()))
    return {"strategy": row["strategy"], "parameters": parameters}
