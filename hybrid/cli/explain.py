"""``hybrid explain``: why each step of a recorded run is what it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """Examples:

  hybrid explain run.jsonl

  hybrid explain run.jsonl --png run.png

  hybrid explain run.jsonl --json | jq 'select(.mode == "ar")'
"""


def explain(
    run: Annotated[Path, typer.Argument(help="A recorded run, as JSON lines.")],
    png: Annotated[
        Path | None, typer.Option(help="Draw the run over its steps to this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a step.")] = False,
) -> None:
    """Say, step by step, why the router of a recorded run chose what it did."""
    from hybrid.router.explain import describe, draw, reasons
    from hybrid.router.record import read_run, replay
    from hybrid.tui.text import clean

    header, records = read_run(run)
    decisions = list(replay(header, records))
    if png is not None:
        typer.echo(str(draw(header, records, png)), err=True)
    if as_json:
        for reason in reasons(decisions):
            typer.echo(json.dumps(reason))
    else:
        for line in describe(header, decisions):
            typer.echo(clean(line))
