"""``hybrid sweep``: which setting of a preset to take; the grid, its Pareto front, the choice.

stdout holds the points and, on its last line, the flags of the chosen one; with ``--json`` one
document alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybrid.cli import options
from hybrid.cli.eval import (
    ReportOptions,
    TaskOptions,
    environment_of,
    measuring,
    report_progress,
    say_plots_are_missing,
    settings_of,
)
from hybrid.cli.options import ModelOptions, StrategyOptions

if TYPE_CHECKING:
    from hybrid.eval.cells import Cell
    from hybrid.eval.runner import Evaluation
    from hybrid.eval.task import Task
    from hybrid.strategy import Strategy

EXAMPLES = """Examples:

  hybrid sweep --strategy speculative --grid block_size=2,4,8 --limit 10

  hybrid sweep --strategy fast-dllm --grid threshold=0.7,0.8,0.9 --grid block_size=8,16,32 \\
      --model LLADA --out sweep

  hybrid sweep --strategy speculative --grid block_size=4,8 --quality agreement \\
      --prompts questions.txt
"""
_QUALITIES = ("accuracy", "agreement")


@dataclass(frozen=True)
class SweepOptions:
    """The grid, and what counts as quality."""

    grid: Annotated[
        list[str],
        typer.Option(
            metavar="KEY=VALUE,...",
            help="Values of a parameter; repeatable: every combination is measured.",
        ),
    ] = field(default_factory=list)
    quality: Annotated[
        str,
        typer.Option(help="accuracy on the tasks, or agreement with the tokens of ar on prompts."),
    ] = "accuracy"
    prompts: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Of --quality agreement; default: those of bench."),
    ] = None


@options.flatten
def sweep(
    model: ModelOptions,
    strategy: StrategyOptions,
    what: SweepOptions,
    asked: TaskOptions,
    how: ReportOptions,
) -> None:
    """Measure every setting of a grid and choose the fastest that is good enough."""
    _check_usage(strategy, what, asked)
    from hybrid.eval.grid import command_line, read_strategies
    from hybrid.eval.pareto import choose, points

    grid = read_strategies([strategy.strategy or ""], strategy.settings, what.grid)
    tasks = _tasks(what, asked)
    with measuring(model, how.out, allow_unverified=strategy.allow_unverified) as run:
        decoder, evaluation = run
        cells, baseline = _cells(evaluation, grid, tasks, is_agreement=what.quality == "agreement")
    found = points([cell.row for cell in cells])
    document: dict[str, Any] = {
        "kind": "sweep",
        "settings": {
            **settings_of(model, decoder),
            "strategy": strategy.strategy,
            "grid": what.grid,
            "quality": what.quality,
            "max_drop": how.max_drop,
            "tasks": [task.name for task in tasks],
            "limit": asked.limit,
        },
        "points": found,
        "chosen": choose(found, how.max_drop),
        "baseline": None if baseline is None else points([baseline.row])[0],
        "rows": [cell.row for cell in cells],
        "environment": environment_of(decoder),
    }
    if how.out is not None:
        _write(document, how.out)
    if how.as_json:
        typer.echo(json.dumps(document))
    else:
        _print(document)
        typer.echo(command_line(document["chosen"]))


def _check_usage(strategy: StrategyOptions, what: SweepOptions, asked: TaskOptions) -> None:
    is_agreement = what.quality == "agreement"
    if what.quality not in _QUALITIES:
        raise typer.BadParameter(
            f"--quality: got {what.quality!r}, expected accuracy or agreement."
        )
    if strategy.strategy is None or not what.grid:
        raise typer.BadParameter("A sweep needs --strategy PRESET and --grid KEY=VALUE,VALUE.")
    if is_agreement and asked.tasks:
        raise typer.BadParameter("--tasks is for --quality accuracy; give --prompts instead.")
    if not is_agreement and what.prompts is not None:
        raise typer.BadParameter("--prompts is for --quality agreement; give --tasks instead.")


def _tasks(what: SweepOptions, asked: TaskOptions) -> list[Task]:
    from hybrid.eval.agreement import prompt_task
    from hybrid.eval.task import read_tasks

    if what.quality == "agreement":
        found = [prompt_task(what.prompts, asked.max_new_tokens)]
    else:
        found = read_tasks(asked.tasks, asked.max_new_tokens)
    return [task.first(asked.limit) for task in found]


def _cells(
    evaluation: Evaluation, grid: list[Strategy], tasks: list[Task], *, is_agreement: bool
) -> tuple[list[Cell], Cell | None]:
    """Return the cells of the grid, and that of `ar` where it is what they must agree with."""
    from hybrid.eval.agreement import expecting
    from hybrid.strategy import Strategy

    ar, baseline = Strategy.preset("ar"), None
    evaluation.check([ar, *grid] if is_agreement else grid, tasks)
    if is_agreement:
        baseline = evaluation.cell(ar, tasks[0])
        tasks = [expecting(tasks[0], baseline)]
    return evaluation.cells(grid, tasks, report_progress), baseline


def _write(document: Mapping[str, Any], folder: Path) -> None:
    from hybrid.eval.plots import plot_front
    from hybrid.files import write_json
    from hybrid.pictures import is_available

    write_json(folder / "sweep.json", document)
    if is_available():
        plot_front(document, folder / "front.png")
    else:
        say_plots_are_missing()


def _print(document: Mapping[str, Any]) -> None:
    from hybrid.bench.tables import TextTable, machine_of
    from hybrid.cli.bench_tables import print_text
    from hybrid.eval.grid import label

    points = [*document["points"]]
    if document["baseline"] is not None:
        points.append({**document["baseline"], "is_on_front": False})
    lines = tuple(
        (
            label(point),
            f"{point['quality']:.1%}",
            f"{point['num_right']}/{point['num_items']}",
            f"{point['tokens_per_second']:.1f}",
            f"{point['tokens_per_forward']:.2f}",
            _role(point, document),
        )
        for point in points
    )
    quality = document["settings"]["quality"]
    right = "right" if quality == "accuracy" else "equal"
    columns = ("setting", quality, right, "tokens/s", "TPF", "Pareto")
    print_text([TextTable("Sweep", columns, lines)], [machine_of(document)])


def _role(point: Mapping[str, Any], document: Mapping[str, Any]) -> str:
    if point == document["chosen"]:
        return "chosen"
    return "front" if point["is_on_front"] else ""
