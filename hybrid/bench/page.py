"""A Markdown page whose tables are made from committed lines of ``hybrid bench``.

A block names what it shows; everything between its markers is made again, the rest is the author's:

    <!-- bench:begin ../benchmarks/results/cpu.jsonl line 3 -->
    <!-- bench:end -->

The path starts at the page's folder; without a line number all lines are shown. The same lines give
the same page, so a test can compare. Next: hybrid/bench/tables.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid.bench.tables import TextTable, machine_of, remarks_of, tables_of
from hybrid.errors import ConfigError

_BLOCK = re.compile(
    r"(<!-- bench:begin (?P<file>\S+)(?: line (?P<line>\d+))? -->\n).*?(<!-- bench:end -->)",
    re.DOTALL,
)


def render(page: str, folder: Path) -> str:
    """Return the page with its blocks made again.

    Args:
        page: Markdown with at least one block.
        folder: where the blocks' paths start.

    Raises:
        ConfigError: no block, or one that names what is not there or is no report.
    """

    def block(match: re.Match[str]) -> str:
        path, line = folder / match["file"], match["line"]
        parts = _documents(path, None if line is None else int(line))
        text = "\n\n".join(_markdown(path.name, number, found) for number, found in parts)
        return f"{match[1]}\n{text}\n\n{match[4]}"

    made, count = _BLOCK.subn(block, page)
    if count == 0:
        raise ConfigError(
            "The page has no block to fill. Expected a line `<!-- bench:begin RESULTS.jsonl -->` "
            "and below it `<!-- bench:end -->`."
        )
    return made


def _documents(path: Path, line: int | None) -> list[tuple[int, Mapping[str, Any]]]:
    """Return the documents of a file with their line numbers, or the one of a line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        found = [(n, json.loads(text)) for n, text in enumerate(lines, start=1) if text.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    wanted = [(n, document) for n, document in found if line in (None, n)]
    if not wanted:
        raise ConfigError(f"{path}: got line {line}, expected one of {len(found)}.")
    return wanted


def _markdown(name: str, line: int, document: Mapping[str, Any]) -> str:
    try:
        remarks, rows = remarks_of(document), document.get("rows", ())
        if rows and not any("by_category" in row for row in rows):
            remarks.append("This line holds no categories.")
        tables = [markdown_table(table) for table in tables_of(document)]
        return "\n\n".join([_source(name, line, document), *tables, *remarks])
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{name}, line {line} is no report of `hybrid bench`: {error!r}."
        ) from error


def _source(name: str, line: int, document: Mapping[str, Any]) -> str:
    """Return which line it is and what was measured, when, on what."""
    env, settings = document["environment"], document["settings"]
    commit = (env["git_sha"] or "unknown")[:7] + (" with local changes" if env["is_dirty"] else "")
    parts = [f"`{name}` line {line}", env["date"][:10], f"commit {commit}"]
    if document["kind"] == "generate":
        parts.append(
            f"{settings['num_prompts']} prompts ({settings['prompts']}), up to "
            f"{settings['max_new_tokens']} tokens each, batch {settings['batch']}, greedy"
        )
    return f"{', '.join(parts)}. {machine_of(document)}."


def markdown_table(table: TextTable) -> str:
    """Return a table as Markdown, its title above it."""
    align = ["---"] + ["---:"] * (len(table.columns) - 1)
    rows = ([cell.replace("|", "\\|") for cell in row] for row in table.rows)
    lines = ["| " + " | ".join(cells) + " |" for cells in (table.columns, align, *rows)]
    return "\n".join([f"**{table.title}**", "", *lines])
