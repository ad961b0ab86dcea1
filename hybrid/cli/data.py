"""``hybrid data``: make, sample and check training data. stdout holds the path or the report."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybrid.cli import options
from hybrid.cli.options import ModelOptions

if TYPE_CHECKING:
    from hybrid.models.tokenizer import Tokenizer

app = typer.Typer(help="Make, sample and check training data.", no_args_is_help=True)

_EXAMPLES = """Examples:

  hybrid data generate prompts.jsonl --output data.jsonl

  hybrid data generate questions.txt --output data.jsonl --model my-model --limit 500

The same command goes on where a stopped run was.
"""
_PROMPTS_EXAMPLES = """Examples:

  hybrid data prompts --output prompts.jsonl --number 2000

  hybrid data prompts --output code.jsonl --number 500 --start "Write a Python function"
"""
_LINES = 20  # of progress, where there is no terminal

_Model = Annotated[str, typer.Option("--model", "-m", help="default, a folder, a GGUF, a hub id.")]
_Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or int4.")]
_Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
_Batch = Annotated[int, typer.Option(help="Rows decoded together.")]
_TopP = Annotated[float, typer.Option(help="Keep the most probable up to this mass.")]
_Seed = Annotated[int, typer.Option(help="Of sampling.")]
_Output = Annotated[Path, typer.Option("--output", "-o", help="JSON lines to write.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@app.command(epilog=_EXAMPLES)
def generate(
    prompts: Annotated[
        str,
        typer.Argument(
            help="JSON lines with prompt (text), messages or p (ids), or one text per line; - is "
            "stdin."
        ),
    ],
    output: _Output,
    model: _Model = "default",
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Per answer.")
    ] = 192,
    batch: _Batch = 32,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.")] = 0.0,
    top_p: _TopP = 1.0,
    seed: _Seed = 0,
    dtype: _Dtype = "bfloat16",
    device: _Device = "auto",
    limit: Annotated[int | None, typer.Option(help="Only the first prompts.")] = None,
    as_json: _Json = False,
) -> None:
    """Let the model answer prompts: the data that its draft is trained on."""
    from hybrid.training.generate import GenerateConfig
    from hybrid.training.generate import generate as run

    config = GenerateConfig(
        output=output,
        model=model,
        dtype=dtype,
        device=device,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        batch=batch,
        limit=limit,
    )
    asked = _read_prompts(prompts)
    with _Monitor("answers", output) as monitor:
        done = run(asked, config, lambda: _load(model, device, dtype), monitor.report)
    if done.num_empty:
        typer.echo(f"{done.num_empty} prompts got no answer and have no line.", err=True)
    typer.echo(_json(asdict(done)) if as_json else str(output))


@app.command(epilog=_PROMPTS_EXAMPLES)
def prompts(
    output: _Output,
    number: Annotated[int, typer.Option(help="Prompts to write.")],
    start: Annotated[
        list[str], typer.Option(help="How they begin; several take turns. Default: anything.")
    ] = [],  # noqa: B006 - typer copies it
    model: _Model = "default",
    max_new_tokens: Annotated[int, typer.Option(help="Longer prompts are dropped.")] = 96,
    batch: _Batch = 32,
    temperature: Annotated[float, typer.Option("--temperature", "-t")] = 0.9,
    top_p: _TopP = 0.95,
    seed: _Seed = 0,
    dtype: _Dtype = "bfloat16",
    device: _Device = "auto",
    as_json: _Json = False,
) -> None:
    """Let the model write prompts itself, by continuing the user's turn of its chat template."""
    from hybrid.training.sample import SampleConfig, sample_prompts

    config = SampleConfig(
        output=output,
        num_prompts=number,
        starts=tuple(start) or ("",),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        batch=batch,
    )
    with _Monitor("prompts", output) as monitor:
        done = sample_prompts(config, lambda: _load(model, device, dtype), monitor.report)
    if done.num_prompts < number:
        typer.echo(
            f"Only {done.num_prompts} of {number} prompts in {done.num_tried} turns: the others "
            "did not end, or repeated one. Give more starts.",
            err=True,
        )
    typer.echo(_json(asdict(done)) if as_json else str(output))


@app.command(epilog="Example: hybrid data inspect data.jsonl --show 3")
def inspect(
    data: Annotated[Path, typer.Argument(help="JSON lines with p and r, or prompt and response.")],
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Decodes and checks; default: what made the data."),
    ] = None,
    show: Annotated[int, typer.Option(min=0, help="Examples to print.")] = 2,
    as_json: _Json = False,
) -> None:
    """Report what a data file holds; exit code 1 when training would refuse a line of it."""
    from hybrid.training.describe import describe

    tokenizer, limits = _tokenizer(data, model)
    description = describe(data, tokenizer=tokenizer, num_samples=show, **limits)
    if as_json:
        typer.echo(_json(description.to_dict()))
    else:
        from hybrid.cli.data_tables import print_description

        print_description(description)
    if description.num_bad:
        raise typer.Exit(1)


def _read_prompts(argument: str) -> Any:
    from hybrid.prompt_files import read_bytes
    from hybrid.training.prompts import read_prompts

    if argument == "-":
        return read_prompts(sys.stdin.buffer.read(), "stdin")
    path = Path(argument)
    return read_prompts(read_bytes(path, "prompts"), path.name)


def _load(model: str, device: str, dtype: str) -> Any:
    return options.load_decoder(ModelOptions(model=model, device=device, dtype=dtype))


def _tokenizer(data: Path, model: str | None) -> tuple[Tokenizer | None, dict[str, int]]:
    """Return the tokenizer and the limits of the model: the one named, or what made the data."""
    from hybrid.models.checkpoint import read_json
    from hybrid.models.store import resolve
    from hybrid.models.tokenizer import load_tokenizer
    from hybrid.training.generate import made_by

    model = made_by(data) if model is None else model
    if model is None:
        return None, {}
    with options.progress_bar() as report:
        path = resolve(model, "bfloat16", progress=report)
    config = read_json(path / "config.json")
    names = {"vocab_size": "vocab_size", "max_length": "max_position_embeddings"}
    limits = {ours: config[theirs] for ours, theirs in names.items() if config.get(theirs)}
    return load_tokenizer(path), limits


def _json(values: dict[str, Any]) -> str:
    return json.dumps(values, default=str)


class _Monitor:
    """Shows progress on stderr, live on a terminal, else as lines; says what Ctrl-C leaves."""

    def __init__(self, what: str, output: Path) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        console = Console(stderr=True)
        self._what, self._output = what, output
        self._first = self._done = self._printed = 0
        self._started: float | None = None
        self._is_live = console.is_terminal
        text = TextColumn("{task.description}", markup=False)
        self._live = Progress(text, BarColumn(), console=console, disable=not self._is_live)
        self._task = self._live.add_task("")

    def __enter__(self) -> _Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._live.stop()
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            typer.echo(
                f"Stopped after {self._done} {self._what}, kept in {self._output}.", err=True
            )

    def report(self, done: int, total: int, num_tokens: int) -> None:
        """Show how far it is."""
        now = time.perf_counter()
        if self._started is None:  # the model is loaded, with a bar of its own
            self._started, self._first = now, done
            self._live.start()
        self._done, seconds = done, now - self._started
        line = f"{done}/{total} {self._what}"
        if seconds > 0 and done > self._first:
            left = timedelta(seconds=round(seconds / (done - self._first) * (total - done)))
            line += f"  {num_tokens / seconds:.0f} tokens/s  {left} left"
        self._live.update(self._task, description=line, completed=done, total=total)
        if not self._is_live and done * _LINES // total > self._printed:
            self._printed = done * _LINES // total
            typer.echo(line, err=True)
