"""The tables of ``hybrid bench``, made from its JSON document alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

# Of a table that is written to a file or a pipe.
_WIDTH = 140


def print_tables(document: dict[str, Any]) -> None:
    """Print what the JSON document holds, for people."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    if document["kind"] == "widths":
        console.print(_widths_table(document["ms_per_forward"]))
    else:
        rows = document["rows"]
        console.print(_speed_table(rows))
        console.print(_steps_table([row for row in rows if row["engine"] == "hybrid"]))
        for line in _divergences(rows):
            console.print(line, markup=False)
    env = document["environment"]
    where = env["gpu"] or f"{env['cpu']}, {env['threads']} threads"
    console.print(
        f"{where}; torch {env['torch']}, transformers {env['transformers']}; "
        f"peak of the whole process {env['peak_memory_mib']:.0f} MiB",
        markup=False,
    )


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table


def _widths_table(times: dict[str, dict[str, float]]) -> Table:
    table = _table("Milliseconds per forward", "rows", *times)
    for width in next(iter(times.values())):
        table.add_row(width, *(f"{own[width]:.1f}" for own in times.values()))
    return table


def _speed_table(rows: list[dict[str, Any]]) -> Table:
    baselines = list(rows[0]["ratios"])
    ratios = [f"× {name}" for name in baselines]
    table = _table("Speed", "candidate", *ratios, "tokens/s", "overhead", "planned MiB", "equal to")
    for row in rows:
        overhead, memory = row.get("loop_overhead"), row.get("planned_memory_mib")
        equal = "-"
        if row["reference"] is not None:
            equal = f"{row['reference']}: {row['num_greedy_match']}/{len(row['seconds'])}"
        table.add_row(
            row["name"],
            *(f"{row['ratios'][name]:.2f}" for name in baselines),
            f"{row['tokens_per_second']['p50']:.1f}",
            "-" if overhead is None else f"{overhead:.1%}",
            "-" if memory is None else f"{memory:.0f}",
            equal,
        )
    return table


def _steps_table(rows: list[dict[str, Any]]) -> Table:
    table = _table(
        "Steps",
        "candidate",
        "acceptance",
        "TPF",
        "prefill/draft/verify",
        "passes that accepted 0, 1, 2 ...",
        "ms per forward by width",
    )
    for row in rows:
        times = (row["ms_per_forward"] or {}).items()
        table.add_row(
            row["name"],
            f"{row['acceptance_length']:.2f}",
            f"{row['tokens_per_forward']:.2f}",
            "/".join(str(count) for count in row["forwards"].values()),
            " ".join(map(str, row["acceptance_histogram"])) or "-",
            ", ".join(f"{width}: {ms:.1f}" for width, ms in times) or "-",
        )
    return table


def _divergences(rows: list[dict[str, Any]]) -> list[str]:
    """Return one sentence per row that is not equal to its reference."""
    return [
        f"{row['name']} leaves {row['reference']} first in prompt {where['prompt']} at token "
        f"{where['position']}: expected {where['expected']}, got {where['got']}, top-2 margin "
        f"{where['margin']:.2g} (largest of all {row['largest_margin']:.2g})."
        for row in rows
        if (where := row.get("first_divergence")) is not None
    ]
