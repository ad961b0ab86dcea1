"""``hybrid train``: one command per recipe. stdout holds the folder of what was trained alone."""

from __future__ import annotations

import inspect
import json
import re
import signal
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from hybrid.cli.options import progress_bar
from hybrid.config import parse_setting
from hybrid.errors import ConfigError, did_you_mean
from hybrid.training import recipes

if TYPE_CHECKING:
    from hybrid.training.config import TrainConfig

_EXAMPLES = """Examples:

  hybrid train {recipe} --data answers.jsonl --output run

  hybrid train {recipe} --config run.yaml --set seed=1 --set precision=float32

  accelerate launch -m hybrid train {recipe} --config run.yaml

The same command goes on where a stopped run was saved last.
"""
_LINE_EVERY = 50  # steps, where there is no terminal


class _Recipes(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the recipe."""
        if args and args[0] not in self.commands:
            ctx.fail(f"Unknown recipe {args[0]!r}.{did_you_mean(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


class _RecipeCommand(TyperCommand):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Describe the recipe's fields as well; only now is its configuration imported."""
        self.epilog = f"{_EXAMPLES.format(recipe=self.name)}\n\n{_fields(self.name or '')}"
        super().format_help(ctx, formatter)


app = typer.Typer(cls=_Recipes, no_args_is_help=True, help="Train what drafts for a model.")


def _train(
    context: typer.Context,
    data: Annotated[
        Path | None, typer.Option(help="JSON lines with p and r (ids), or prompt and response.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder of the run.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="default, a folder, a GGUF file, a hub id.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak; falls to 0.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same result.")] = None,
    settings: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="Any other field; repeatable.")
    ] = [],  # noqa: B006 - typer copies it
    config: Annotated[
        Path | None, typer.Option(help="YAML or JSON file of fields; flags go before it.")
    ] = None,
) -> None:
    flags = {
        "data": data,
        "output": output,
        "model": model,
        "steps": steps,
        "learning_rate": learning_rate,
        "seed": seed,
    }
    values = {} if config is None else _read_config(config)
    values |= dict(parse_setting(text, "--set") for text in settings)
    values |= {name: value for name, value in flags.items() if value is not None}
    for name in ("data", "output"):
        if name not in values:
            raise ConfigError(f"{name}: got nothing, expected a path. Give --{name} PATH.")
    recipe = str(context.info_name)
    _run(recipe, recipes.config_class(recipe)(**values))


for _name, _entry in recipes.RECIPES.items():
    app.command(_name, cls=_RecipeCommand, help=_entry.about)(_train)


def _fields(recipe: str) -> str:
    """Return the fields with their defaults and what the docstrings say, a paragraph each."""
    from rich.markup import escape

    found = recipes.config_class(recipe)
    texts: dict[str, str] = {}
    for cls in found.__mro__:
        listed = inspect.getdoc(cls) or ""
        _, _, attributes = listed.partition("Attributes:\n")
        for name, text in re.findall(r"^    (\w+): (.*(?:\n     .*)*)", attributes, re.MULTILINE):
            texts.setdefault(name, " ".join(text.split()))
    lines = ["Fields, for --set KEY=VALUE and --config:"]
    for name, info in found.model_fields.items():
        default = "" if info.is_required() else f"={_shown(info.get_default())}"
        lines.append(f"{name}{default}: {texts.get(name, '')}")
    return escape("\n\n".join(lines))  # shapes stand in brackets


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _run(name: str, config: TrainConfig) -> None:
    from hybrid.models.store import resolve
    from hybrid.pictures import is_available
    from hybrid.training.data import data_sha256
    from hybrid.training.loop import this_process, train

    data_sha256(config.data)  # bad data is refused before anything is fetched
    if not this_process().is_main_process:  # the main one alone talks
        train(recipes.build(name, config))
        return
    with progress_bar() as fetched:
        resolve(config.model, recipes.RECIPES[name].precision, progress=fetched)
    monitor = _Monitor(config)
    try:
        with monitor:
            folder = train(recipes.build(name, config), monitor.report)
    except KeyboardInterrupt:
        done = "before the first step" if monitor.step == 0 else f"after step {monitor.step}"
        typer.echo(
            f"Stopped {done} of {config.steps}. The same command goes on from the last checkpoint "
            f"in {config.output}.",
            err=True,
        )
        raise
    if not is_available():
        typer.echo("No plot without matplotlib: pip install 'hybrid-decoder[plot]'", err=True)
    typer.echo(str(folder))


class _Monitor:
    """Shows metrics on stderr, live on a terminal, else as lines; turns Ctrl-C into a clean stop.

    The first Ctrl-C lets the step end, so that it can be saved; the second one does not wait.
    """

    def __init__(self, config: TrainConfig) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        console = Console(stderr=True)
        self._config, self.step, self._first_step = config, 0, 0
        self._length, self._started, self._is_stopping = "", time.perf_counter(), False
        self._is_live = console.is_terminal
        text = TextColumn("{task.description}", markup=False)
        self._live = Progress(text, BarColumn(), console=console, disable=not self._is_live)
        self._task = self._live.add_task("Loading ...", total=config.steps)

    def __enter__(self) -> None:
        self._old_handler = signal.signal(signal.SIGINT, self._interrupt)
        if not self._is_live:
            typer.echo("Loading ...", err=True)
        self._live.start()

    def __exit__(self, *error: object) -> None:
        self._live.stop()
        signal.signal(signal.SIGINT, self._old_handler)

    def report(self, row: Mapping[str, Any]) -> None:
        """Show one step.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed during the step.
        """
        self.step = row["step"]
        if self._first_step == 0:
            self._first_step, self._started = self.step, time.perf_counter()
        if "expected_acceptance_length" in row:
            self._length = f"  E {row['expected_acceptance_length']:.2f}"
        line = f"step {self.step}/{self._config.steps}  loss {row['loss']:.3f}{self._length}"
        line += self._time_left()
        self._live.update(self._task, description=line, completed=self.step)
        every = (self._config.eval_every, _LINE_EVERY)
        is_line = self.step == self._config.steps or any(self.step % n == 0 for n in every)
        if is_line and not self._is_live:
            typer.echo(line, err=True)
        if self._is_stopping:
            raise KeyboardInterrupt

    def _time_left(self) -> str:
        num_timed = self.step - self._first_step
        if num_timed == 0:
            return ""
        per_step = (time.perf_counter() - self._started) / num_timed
        left = timedelta(seconds=round(per_step * (self._config.steps - self.step)))
        return f"  {left} left"

    def _interrupt(self, *_: object) -> None:
        if self._is_stopping:
            raise KeyboardInterrupt
        self._is_stopping = True


def _read_config(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix.lower() == ".json":
            values = json.loads(text)
        else:
            import yaml  # type: ignore[import-untyped]

            values = yaml.safe_load(text)
    except ImportError as error:
        raise ConfigError(f"--config: {path} needs PyYAML. Install it or give JSON.") from error
    # YAML's own errors are not ValueErrors.
    except Exception as error:
        raise ConfigError(f"--config: {path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--config: {path} holds {values!r}, expected names and values.")
    return values
