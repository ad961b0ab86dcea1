"""``hybrid export``: a drafter or an adapter for another engine, and the command that serves it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """Examples:

  hybrid export vllm run/dflash -o drafter --target Qwen/Qwen3-8B

  hybrid export speculators run/dflash -o speculator --target Qwen/Qwen3-8B

  hybrid export sglang run/adapter -o adapter
"""


def export(
    engine: Annotated[str, typer.Argument(help="vllm, sglang, speculators or hf.")],
    folder: Annotated[Path, typer.Argument(help="A DFlash drafter or a diffusion adapter.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write.")],
    target: Annotated[
        str | None,
        typer.Option(help="Model that it drafts for; default: what the folder says."),
    ] = None,
    custom_generate: Annotated[
        bool,
        typer.Option(
            "--custom-generate",
            help="With hf: write the target, with a generate() that drafts by this project.",
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a trained drafter as another engine loads it; print the command that serves it."""
    from hybrid.export.export import export as run

    done = run(engine, folder, output, target=target, custom_generate=custom_generate, force=force)
    if as_json:
        typer.echo(json.dumps({**asdict(done), "folder": str(done.folder)}))
        return
    typer.echo(f"Wrote {done.folder}. Serve it with:", err=True)
    typer.echo(done.command)
