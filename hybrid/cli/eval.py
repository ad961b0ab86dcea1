"""``hybrid eval``: accuracy against tokens per forward and time, and a gate against regressions.

stdout holds the tables or, with ``--json``, one document; progress is on stderr.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybrid.cli import options
from hybrid.cli.options import ModelOptions

if TYPE_CHECKING:
    from hybrid.decoder import HybridDecoder
    from hybrid.eval.compare import Drop
    from hybrid.eval.runner import Evaluation
    from hybrid.strategy import Strategy

EXAMPLES = """Examples:

  hybrid eval --limit 10 --out report

  hybrid eval --strategy ar --strategy "speculative block_size=4" --tasks arithmetic

  hybrid eval --strategy fast-dllm --grid threshold=0.7,0.8,0.9 --model LLADA --out report

  hybrid eval --tasks mine.jsonl --compare report/report.json --max-drop 0.01

  hybrid eval --compare old.json --against new.json
"""


@dataclass(frozen=True)
class TaskOptions:
    """What is asked."""

    tasks: Annotated[
        list[str],
        typer.Option(
            help="arithmetic, code, extraction, or a file of JSON lines; repeatable. "
            "Default: those three.",
        ),
    ] = field(default_factory=list)
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first questions of each task.")
    ] = None
    max_new_tokens: Annotated[
        int | None,
        typer.Option("--max-new-tokens", "-n", min=1, help="Length limit; default: the task's."),
    ] = None


@dataclass(frozen=True)
class ReportOptions:
    """What is done with the numbers."""

    max_drop: Annotated[
        float, typer.Option(min=0, help="Drop that is allowed: 0.01 is one percent point.")
    ] = 0.01
    out: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Folder of report, plots and finished cells."),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON document alone.")] = False


@dataclass(frozen=True)
class EvalOptions:
    """What is measured, and against what."""

    strategies: Annotated[
        list[str],
        typer.Option(
            "--strategy",
            help='NAME or "NAME KEY=VALUE ..."; repeatable; see hybrid list presets. Default: ar '
            "where the model can verify, and what its weights are meant for.",
        ),
    ] = field(default_factory=list)
    settings: options.Settings = field(default_factory=list)
    grid: Annotated[
        list[str],
        typer.Option(metavar="KEY=VALUE,...", help="Values that make a curve; repeatable."),
    ] = field(default_factory=list)
    allow_unverified: Annotated[
        bool,
        typer.Option("--allow-unverified", help="Let a model verify that was not trained to."),
    ] = False
    compare: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="An older report.json: exit code 1 if this is worse."),
    ] = None
    against: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Compare with this report instead of measuring."),
    ] = None


@options.flatten
def evaluate(
    model: ModelOptions, what: EvalOptions, asked: TaskOptions, how: ReportOptions
) -> None:
    """Measure accuracy, tokens per forward and time of strategies on tasks with answers."""
    if what.against is not None and what.compare is None:
        raise typer.BadParameter("--against needs --compare OLD.json.")
    from hybrid.eval.compare import compare, read_report

    old = None if what.compare is None else read_report(what.compare)
    if what.against is not None:
        new, document = read_report(what.against), {}
    else:
        new = document = _measure(model, what, asked, how)
    drops = [] if old is None else compare(old, new, how.max_drop)
    if how.as_json:
        if old is not None:
            found = [drop._asdict() for drop in drops]
            document = {**document, "comparison": {"max_drop": how.max_drop, "drops": found}}
        typer.echo(json.dumps(document))
    else:
        _print(document, None if old is None else drops, how)
    if drops:
        raise typer.Exit(1)


def _measure(
    model: ModelOptions, what: EvalOptions, asked: TaskOptions, how: ReportOptions
) -> dict[str, Any]:
    from hybrid.eval.grid import read_strategies
    from hybrid.eval.report import document_of
    from hybrid.eval.task import read_tasks

    strategies = read_strategies(what.strategies, what.settings, what.grid)
    tasks = [task.first(asked.limit) for task in read_tasks(asked.tasks, asked.max_new_tokens)]
    with measuring(model, how.out, allow_unverified=what.allow_unverified) as run:
        decoder, evaluation = run
        strategies = strategies or _usual(decoder)
        evaluation.check(strategies, tasks)
        cells = evaluation.cells(strategies, tasks, report_progress)
    settings = {
        **settings_of(model, decoder),
        "tasks": [task.name for task in tasks],
        "limit": asked.limit,
    }
    document = document_of([cell.row for cell in cells], settings, environment_of(decoder))
    if how.out is not None:
        _write(document, how.out)
    return document


def _usual(decoder: HybridDecoder) -> list[Strategy]:
    default = decoder.resolve_strategy()
    if not decoder.backbone.can_verify:
        return [default]
    return [decoder.resolve_strategy("ar"), default]


@contextmanager
def measuring(
    model: ModelOptions, out: Path | None, *, allow_unverified: bool
) -> Iterator[tuple[HybridDecoder, Evaluation]]:
    """Load the model and yield it with its cells; say what Ctrl-C leaves."""
    from hybrid.bench.candidates import precision
    from hybrid.eval.cells import Cells, files_stamp
    from hybrid.eval.runner import Evaluation

    decoder = options.load_decoder(model)
    drafter = None if model.drafter is None else model.drafter.removeprefix("dflash:")
    path = None if out is None else out / "cells.jsonl"
    cells = Cells(
        path,
        environment_of(decoder),
        model=asdict(model),
        dtype=precision(decoder.backbone),
        files=files_stamp(model.model, model.adapter, drafter),
        allow_unverified=allow_unverified,
    )
    if path is not None and path.exists() and not cells.is_reusing:
        typer.echo("The code has local changes: cells of earlier runs are not reused.", err=True)
    try:
        yield decoder, Evaluation(decoder, cells, allow_unverified=allow_unverified)
    except KeyboardInterrupt:
        if path is not None and path.exists():
            typer.echo(f"Stopped. Finished cells are kept in {path}.", err=True)
        raise


def environment_of(decoder: HybridDecoder) -> dict[str, Any]:
    """Return where and with what is measured."""
    from hybrid.bench.environment import describe

    return describe(decoder.backbone.device)


def settings_of(model: ModelOptions, decoder: HybridDecoder) -> dict[str, Any]:
    """Return the model's flags, and what is the same for every cell."""
    from hybrid.bench.candidates import SEED, precision

    dtype = precision(decoder.backbone)
    return {**asdict(model), "dtype": dtype, "temperature": 0, "seed": SEED, "batch": 1}


def report_progress(row: Mapping[str, Any], done: int, total: int) -> None:
    """Print a line per finished cell on stderr."""
    from hybrid.eval.grid import label

    number = f"{row['accuracy']:.1%}, {row['tokens_per_forward']:.2f} tokens per forward"
    typer.echo(f"{done}/{total} {row['task']}, {label(row)}: {number}", err=True)


def say_plots_are_missing() -> None:
    """Say how to get the pictures; the numbers do not need them."""
    typer.echo("No plots: pip install 'hybrid-decoder[plot]' draws them.", err=True)


def _write(document: Mapping[str, Any], folder: Path) -> None:
    from hybrid.eval.plots import plot_report
    from hybrid.eval.report import markdown_of
    from hybrid.files import replacing, write_json
    from hybrid.pictures import is_available

    write_json(folder / "report.json", document)
    pictures = plot_report(document, folder) if is_available() else []
    if not pictures:
        say_plots_are_missing()
    page = folder / "report.md"
    with replacing(page) as part:
        part.write_text(markdown_of(document, [path.name for path in pictures]), encoding="utf-8")


def _print(document: Mapping[str, Any], drops: list[Drop] | None, how: ReportOptions) -> None:
    from hybrid.cli.bench_tables import print_text
    from hybrid.eval.compare import table_of
    from hybrid.eval.report import remarks_of, tables_of

    tables = tables_of(document) if document else []
    remarks = remarks_of(document) if document else []
    if drops:
        tables.append(table_of(drops, how.max_drop))
    elif drops is not None:
        remarks.append(f"Nothing dropped by more than {how.max_drop:g}.")
    if document and how.out is not None:
        remarks.append(f"{how.out / 'report.md'} and report.json hold the report.")
    print_text(tables, remarks)
