"""What a JSON document of ``hybrid bench`` says, as tables of text; terminal and page lay them out.

Made from the document alone: the same line gives the same tables. A line from before a field was
recorded is completed where it holds what that is computed from. Next: hybrid/bench/page.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid.config import spell_settings
from hybrid.metrics import acceptance_by_position, speedup

NOTHING = "-"


@dataclass(frozen=True, slots=True)
class TextTable:
    """A title, a heading for each column, and rows of as many cells; the first names the row."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables_of(document: Mapping[str, Any]) -> list[TextTable]:
    """Return the tables of one document, without those that would be empty."""
    if document["kind"] == "widths":
        times = document["ms_per_forward"]
        return [_by_key("Milliseconds per forward by rows", "precision", times, "{:.1f}")]
    rows = document["rows"]
    if document["kind"] == "policies":
        return [_policies(rows, document["settings"]["bar"])]
    ours = [row for row in rows if row["engine"] == "hybrid"]
    times = {row["name"]: row["ms_per_forward"] or {} for row in ours}
    found = [
        _speed(rows),
        _steps(ours),
        _costs(ours),
        _positions(ours),
        _by_key("Milliseconds per forward by tokens in the pass", "candidate", times, "{:.1f}"),
        _categories(ours),
    ]
    return [table for table in found if table.rows]


def remarks_of(document: Mapping[str, Any]) -> list[str]:
    """Return what equality was judged by, and a sentence per row that is not equal."""
    if document["kind"] != "generate":
        return []
    rows = document["rows"]
    pairs = {row["dtype"]: row["reference"] for row in rows if row["reference"] is not None}
    remarks = [f"Equal in {dtype}: the tokens of {name}." for dtype, name in pairs.items()]
    return remarks + [
        f"{row['name']} leaves {row['reference']} first in prompt {where['prompt']} at token "
        f"{where['position']}: expected {where['expected']}, got {where['got']}, top-2 margin "
        f"{where['margin']:.2g} (largest of all {row['largest_margin']:.2g})."
        for row in rows
        if (where := row.get("first_divergence")) is not None
    ]


def machine_of(document: Mapping[str, Any]) -> str:
    """Return where it was measured and with what."""
    env = document["environment"]
    where = env["gpu"] or f"{env['cpu']}, {env['threads']} threads"
    return (
        f"{where}; torch {env['torch']}, transformers {env['transformers']}; "
        f"peak of the whole process {env['peak_memory_mib']:.0f} MiB"
    )


def ratio_to_ar(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the ratio to our own `ar` in the same precision, None where that was not measured."""
    if row["engine"] != "hybrid" or "ar" in row["ratios"]:
        found: float | None = row["ratios"].get("ar")
        return found
    mine = (row["engine"], row["dtype"], "ar")
    ar = next((r for r in rows if (r["engine"], r["dtype"], r.get("strategy")) == mine), None)
    return None if ar is None else speedup(_seconds_per_token(row), _seconds_per_token(ar))


def _seconds_per_token(row: Mapping[str, Any]) -> list[float]:
    return [s / n for s, n in zip(row["seconds"], row["num_tokens"], strict=True)]


def _speed(rows: Sequence[Mapping[str, Any]]) -> TextTable:
    others = list(dict.fromkeys(name for row in rows for name in row["ratios"] if name != "ar"))
    lines = []
    for row in rows:
        matches = row.get("num_greedy_match")
        equal = NOTHING if matches is None else f"{matches}/{len(row['seconds'])}"
        ratios = [*(row["ratios"].get(name) for name in others), ratio_to_ar(row, rows)]
        cells = (_cell(ratio, "{:.2f}") for ratio in ratios)
        lines.append((row["name"], *cells, f"{row['tokens_per_second']['p50']:.1f}", equal))
    headings = (*(f"× {name}" for name in others), "× own ar", "tokens/s", "equal")
    return TextTable("Speed", ("candidate", *headings), tuple(lines))


def _steps(rows: Sequence[Mapping[str, Any]]) -> TextTable:
    lines: list[tuple[str, ...]] = [
        (
            row["name"],
            row["drafter"] or NOTHING,
            str(row["num_draft_tokens"]) if row["drafter"] else NOTHING,
            f"{row['acceptance_length']:.2f}" if row["drafter"] else NOTHING,
            f"{row['tokens_per_forward']:.2f}",
            f"{row['forwards']['draft']}/{row['forwards']['verify']}",
        )
        for row in rows
    ]
    headings: tuple[str, ...] = (
        "candidate",
        "drafter",
        "K",
        "acceptance",
        "TPF",
        "draft/verify",
    )
    denoising = [row["forwards"].get("denoise", 0) for row in rows]
    if any(denoising):
        headings = (*headings, "denoising")
        lines = [(*line, str(n)) for line, n in zip(lines, denoising, strict=True)]
    return TextTable("Steps", headings, tuple(lines))


def _costs(rows: Sequence[Mapping[str, Any]]) -> TextTable:
    lines = [
        (
            row["name"],
            _cell(row["loop_overhead"], "{:.1%}"),
            _cell(row["planned_memory_mib"], "{:.0f}"),
        )
        for row in rows
    ]
    return TextTable("Costs", ("candidate", "overhead", "planned MiB"), tuple(lines))


def _policies(rows: Sequence[Mapping[str, Any]], bar: float) -> TextTable:
    lines = [
        (
            f"{row['strategy']} {spell_settings(row['parameters'])}".rstrip(),
            str(row["num_forwards"]),
            f"{row['ms_per_forward']:.2f}",
            f"{row['bare_ms_per_forward']:.2f}",
            f"{row['ratio']:.3f}",
            "yes" if row["ratio"] <= bar else "no",
            f"{row['lean_ratio']:.3f}",
            str(round(row["tensor_bytes_per_forward"])),
            str(round(row["python_bytes_per_forward"])),
        )
        for row in rows
    ]
    headings = (
        "strategy",
        "forwards",
        "ms",
        "bare ms",
        "ratio",
        f"≤ {bar}",
        "× lean",
        "tensor bytes kept",
        "Python bytes kept",
    )
    return TextTable("A forward with its policies and without", headings, tuple(lines))


def _positions(rows: Sequence[Mapping[str, Any]]) -> TextTable:
    shares = {}
    for row in rows:
        count = row["num_draft_tokens"]
        found = acceptance_by_position(row["acceptance_histogram"], count)
        if count:
            shares[row["name"]] = dict(enumerate(found, start=1))
    title = "Passes with a draft that accepted at least so many tokens of it"
    return _by_key(title, "candidate", shares, "{:.0%}")


def _categories(rows: Sequence[Mapping[str, Any]]) -> TextTable:
    columns = ("category", "candidate", "prompts", "acceptance", "× own ar", "equal")
    drafting = [row for row in rows if row["strategy"] != "ar"]
    names = sorted({name for row in drafting for name in row.get("by_category", ())})
    lines = []
    for name in names:
        for row in drafting:
            found = row["by_category"][name]
            matches = found["num_greedy_match"]
            lines.append(
                (
                    name,
                    row["name"],
                    str(found["num_prompts"]),
                    f"{found['acceptance_length']:.2f}",
                    _cell(found["ratio_to_ar"], "{:.2f}"),
                    NOTHING if matches is None else f"{matches}/{found['num_prompts']}",
                )
            )
    return TextTable("By category", columns, tuple(lines))


def _by_key(
    title: str, corner: str, values: Mapping[str, Mapping[Any, float]], form: str
) -> TextTable:
    """Return a table with a row per name and a column per key: numbers first, then words."""
    found = {key for own in values.values() for key in own}
    keys = sorted(found, key=lambda key: (not str(key).isdigit(), len(str(key)), str(key)))
    rows = [(name, *(_cell(own.get(key), form) for key in keys)) for name, own in values.items()]
    return TextTable(title, (corner, *map(str, keys)), tuple(rows) if keys else ())


def _cell(value: float | None, form: str) -> str:
    return NOTHING if value is None else form.format(value)
