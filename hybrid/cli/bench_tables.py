"""What ``hybrid bench`` gives out: a JSON document, and its tables as the terminal or pipe is."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hybrid.bench.tables import NOTHING, TextTable, machine_of, remarks_of, tables_of

if TYPE_CHECKING:
    from rich.console import Console

_ENDLESS = 10_000
_HEADING = 8  # columns a heading may take even where words and cells are shorter


def publish(document: Mapping[str, Any], out: Path | None, *, as_json: bool) -> None:
    """Append the document to the file `out`; print its tables, and itself as the last line."""
    line = json.dumps(document)
    if out is not None:
        _append(out, line)
    if not as_json:
        print_tables(document)
    typer.echo(line)


def _append(path: Path, line: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        typer.echo(f"Warning: {path} cannot be written: {error}", err=True)


def print_tables(document: Mapping[str, Any]) -> None:
    """Print what the JSON document of a benchmark holds, for people."""
    print_text(tables_of(document), [*remarks_of(document), machine_of(document)])


def print_text(tables: Sequence[TextTable], remarks: Sequence[str]) -> None:
    """Print tables and the sentences below them as the terminal or pipe is."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        # A reader of a pipe has lines of any length; wrapped cells would help nobody.
        console = Console(highlight=False, width=_ENDLESS)
    for table in tables:
        _print_table(console, table)
    for line in remarks:
        console.print(line, markup=False, soft_wrap=True)


def _print_table(console: Console, table: TextTable) -> None:
    """Print a table, or what it says row by row where the terminal is too narrow for it."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    title = Text(table.title, style="italic")
    grid = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for index, heading in enumerate(table.columns):
        lines = _wrapped(heading, [row[index] for row in table.rows])
        grid.add_column(Text(lines), justify="right" if index else "left", no_wrap=True)
    for row in table.rows:
        grid.add_row(*map(Text, row))
    console.print(title)
    natural = console.measure(grid, options=console.options.update(width=_ENDLESS)).maximum
    if natural <= console.width:
        console.print(grid)
    else:
        for row in table.rows:
            console.print(Text(row[0], style="bold"))
            pairs = Table.grid(padding=(0, 2))
            for heading, cell in zip(table.columns[1:], row[1:], strict=True):
                if cell != NOTHING:
                    pairs.add_row("", Text(heading), Text(cell))
            console.print(pairs)
    console.print()


def _wrapped(heading: str, cells: list[str]) -> str:
    """Return a heading in lines no longer than its longest word or the cells below it."""
    width = max(_HEADING, *map(len, heading.split()), *map(len, cells))
    return "\n".join(textwrap.wrap(heading, width))
