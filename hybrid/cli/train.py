"""``hybrid train``: teach a model to draft for itself. stdout holds the adapter's folder alone."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from hybrid.cli.options import progress_bar
from hybrid.errors import ConfigError
from hybrid.training.config import SelfDiffusionConfig

app = typer.Typer(no_args_is_help=True)

_EXAMPLES = """Examples:

  hybrid train self-diffusion --data selfgen.jsonl --output run

  hybrid train self-diffusion --config run.yaml --set rank=16 --set feature_layers=2,10,19,28

The same command goes on where a stopped run was saved last.
"""
_LINE_EVERY = 50  # steps, where there is no terminal


@app.callback()
def _train() -> None:
    """Train what drafts for a model."""  # a callback keeps the lone command's name


@app.command("self-diffusion", epilog=_EXAMPLES)
def self_diffusion(
    data: Annotated[
        Path | None, typer.Option(help="JSON lines with p and r (ids), or prompt and response.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder of the run.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="default, a folder, a GGUF file, a hub id.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak; falls to 0.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same adapter.")] = None,
    settings: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="Any other field; repeatable.")
    ] = [],  # noqa: B006 - typer copies it
    config: Annotated[
        Path | None, typer.Option(help="YAML or JSON file of fields; flags go before it.")
    ] = None,
) -> None:
    """Train a diffusion adapter on the model's own answers, from the last checkpoint if any."""
    flags = {
        "data": data,
        "output": output,
        "model": model,
        "steps": steps,
        "learning_rate": learning_rate,
        "seed": seed,
    }
    values = {} if config is None else _read_config(config)
    values |= dict(_parse_setting(text) for text in settings)
    values |= {name: value for name, value in flags.items() if value is not None}
    for name in ("data", "output"):
        if name not in values:
            raise ConfigError(f"{name}: got nothing, expected a path. Give --{name} PATH.")
    _run(SelfDiffusionConfig(**values))


def _run(config: SelfDiffusionConfig) -> None:
    from hybrid.models.store import resolve
    from hybrid.training.data import data_sha256
    from hybrid.training.trainer import train_self_diffusion

    data_sha256(config.data)  # bad data is refused before anything is fetched
    with progress_bar() as fetched:
        resolve(config.model, "bfloat16", progress=fetched)
    monitor = _Monitor(config)
    try:
        with monitor:
            adapter = train_self_diffusion(config, monitor.report)
    except KeyboardInterrupt:
        done = "before the first step" if monitor.step == 0 else f"after step {monitor.step}"
        typer.echo(
            f"Stopped {done} of {config.steps}. The same command goes on from the last checkpoint "
            f"in {config.output}.",
            err=True,
        )
        raise
    typer.echo(str(adapter))


class _Monitor:
    """Shows metrics on stderr, live on a terminal, else as lines; turns Ctrl-C into a clean stop.

    The first Ctrl-C lets the step end, so that it can be saved; the second one does not wait.
    """

    def __init__(self, config: SelfDiffusionConfig) -> None:
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
        is_evaluated = "expected_acceptance_length" in row
        if is_evaluated:
            self._length = f"  E {row['expected_acceptance_length']:.2f}"
        line = f"step {self.step}/{self._config.steps}  loss {row['loss']:.3f}{self._length}"
        line += self._time_left()
        self._live.update(self._task, description=line, completed=self.step)
        if not self._is_live and (is_evaluated or self.step % _LINE_EVERY == 0):
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


def _parse_setting(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise ConfigError(f"--set: got {text!r}, expected KEY=VALUE, as in --set rank=16.")
    literals = [value, f"[{value}]"] if "," in value else [value]  # 1,2 means [1, 2]
    for literal in literals:
        with suppress(json.JSONDecodeError):
            return name, json.loads(literal)
    return name, value


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
