"""From cells to a report: the JSON document, its tables, and a Markdown page made from it alone.

Next: hybrid/eval/compare.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hybrid.bench.page import markdown_table
from hybrid.bench.tables import NOTHING, TextTable, machine_of
from hybrid.errors import ConfigError
from hybrid.eval.grid import label
from hybrid.metrics import aup

Rows = Sequence[Mapping[str, Any]]


def document_of(
    rows: Rows, settings: Mapping[str, Any], environment: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the report as JSON types.

    Args:
        rows: of the cells.
        settings: what was asked for.
        environment: where and with what it was measured.
    """
    return {
        "kind": "eval",
        "settings": dict(settings),
        "rows": list(rows),
        "aup": aup_rows(rows),
        "environment": dict(environment),
    }


def aup_rows(rows: Rows) -> list[dict[str, Any]]:
    """Return AUP per strategy and task: the curve of a strategy is all its settings.

    TPF is that of the decode, `best` the best accuracy of any row of the task. `aup` is None where
    there is none, and `reason` says why.
    """
    curves: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        curves.setdefault((row["strategy"], row["task"]), []).append(row)
    found = []
    for (strategy, task), own in curves.items():
        best = 100 * max(row["accuracy"] for row in rows if row["task"] == task)
        area, reason = None, None
        try:
            tpf = [row["tokens_per_forward"] for row in own]
            area = aup(tpf, [100 * row["accuracy"] for row in own], best)
        except ConfigError as error:
            reason = str(error)
        found.append(
            {
                "strategy": strategy,
                "task": task,
                "num_settings": len(own),
                "best": best,
                "aup": area,
                "reason": reason,
            }
        )
    return found


def tables_of(document: Mapping[str, Any]) -> list[TextTable]:
    """Return the tables of a document of `hybrid eval`."""
    tasks = dict.fromkeys(row["task"] for row in document["rows"])
    return [*(_task(document, task) for task in tasks), _aup(document["aup"])]


def remarks_of(document: Mapping[str, Any]) -> list[str]:
    """Return why a strategy has no AUP, and where all was measured."""
    refused = (row for row in document["aup"] if row["reason"] is not None)
    return [f"{row['strategy']} on {row['task']}: {row['reason']}" for row in refused] + [
        machine_of(document)
    ]


def markdown_of(document: Mapping[str, Any], pictures: Sequence[str] = ()) -> str:
    """Return the report as a page.

    Args:
        document: from `document_of`.
        pictures: names of image files beside the page.
    """
    env, settings = document["environment"], document["settings"]
    commit = (env["git_sha"] or "unknown")[:7] + (" with local changes" if env["is_dirty"] else "")
    head = (
        f"{settings['model']}, {settings['dtype']}, {env['date'][:10]}, hybrid {env['hybrid']}, "
        f"commit {commit}; greedy, batch 1."
    )
    tables = map(markdown_table, tables_of(document))
    images = (f"![{name}]({name})" for name in pictures)
    return "\n\n".join(["# Evaluation", head, *tables, *remarks_of(document), *images]) + "\n"


def _task(document: Mapping[str, Any], task: str) -> TextTable:
    rows = [row for row in document["rows"] if row["task"] == task]
    lines = tuple(
        (
            label(row),
            f"{row['accuracy']:.1%}",
            f"{row['num_right']}/{row['num_items']}",
            f"{row['tokens_per_forward']:.2f}",
            f"{row['total_tokens_per_forward']:.2f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['latency_ms']:.0f}",
        )
        for row in rows
    )
    headings = ("accuracy", "right", "TPF", "total TPF", "tokens/s", "ms per answer")
    return TextTable(task, ("strategy", *headings), lines)


def _aup(rows: Rows) -> TextTable:
    tasks = tuple(dict.fromkeys(row["task"] for row in rows))
    found = {(row["strategy"], row["task"]): row for row in rows}
    lines = []
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        own = [found[strategy, task] for task in tasks if (strategy, task) in found]
        values = {row["task"]: row["aup"] for row in own}
        cells = (NOTHING if values.get(t) is None else f"{values[t]:.1f}" for t in tasks)
        lines.append((strategy, str(max(row["num_settings"] for row in own)), *cells))
    title = "AUP (accuracy under parallelism)"
    return TextTable(title, ("strategy", "settings", *tasks), tuple(lines))
