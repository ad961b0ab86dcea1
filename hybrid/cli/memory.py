"""``hybrid plan-memory``: what a model will allocate, known before the first token."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from hybrid.cli import options
from hybrid.cli.options import ModelOptions

EXAMPLES = """Examples:

  hybrid plan-memory

  hybrid plan-memory --max-seq-len 2048 --batch 8 --json
"""


@options.flatten
def plan_memory(
    model: ModelOptions,
    max_seq_len: Annotated[
        int | None, typer.Option(min=1, help="Context in tokens; default: the model's.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows decoded together.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, in bytes.")] = False,
) -> None:
    """Print the memory that generation allocates."""
    plan = options.load_decoder(model).plan_memory(max_seq_len, batch)
    if as_json:
        typer.echo(json.dumps(plan))
        return
    for name, num_bytes in plan.items():
        typer.echo(f"{name:<12}{num_bytes / 2**20:>12,.1f} MiB")
