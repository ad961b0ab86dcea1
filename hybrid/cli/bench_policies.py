"""``hybrid bench policies``: what denoising costs beside its forwards.

The work is in hybrid/bench/policies.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from hybrid.cli import options
from hybrid.cli.bench_tables import publish

EPILOG = """Examples:

  hybrid bench policies --threads 1

  hybrid bench policies --strategies fast-dllm --set cache=prefix --out overhead.jsonl
"""


@dataclass(frozen=True)
class PolicyOptions:
    """Which presets, on what model, how often."""

    strategies: Annotated[
        str | None, typer.Option(help="Separated by commas; default: all that fit the model.")
    ] = None
    settings: options.Settings = field(default_factory=list)
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="A folder or hub id; default: a random small LLaDA."),
    ] = None
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, help="Length of each answer.")
    ] = 64
    runs: Annotated[int, typer.Option(min=1, help="Timed runs of each side, taking turns.")] = 5
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Append the JSON document to this file.")
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON document alone.")] = False


@options.flatten
def policies(what: PolicyOptions) -> None:
    """Time denoising presets against their bare forwards, and look for memory that they keep.

    The model is random, so the answers are worth nothing: only times are measured, CPU, float32.
    """
    chosen = options.read_strategies(what.strategies, what.settings)

    import torch

    from hybrid.bench.environment import describe
    from hybrid.bench.policies import (
        BAR,
        NUM_PROMPT_TOKENS,
        denoising,
        measure_policies,
        random_llada,
    )
    from hybrid.decoder import HybridDecoder

    if what.threads is not None:
        torch.set_num_threads(what.threads)
    if what.model is None:
        decoder = HybridDecoder(random_llada(), model_name="random LLaDA")
    else:
        model = options.ModelOptions(what.model, device="cpu", dtype="float32")
        decoder = options.load_decoder(model)
    document: dict[str, Any] = {
        "kind": "policies",
        "rows": measure_policies(
            decoder,
            chosen or denoising(decoder),
            max_new_tokens=what.max_new_tokens,
            num_runs=what.runs,
            progress=_progress,
        ),
        "settings": {
            "model": decoder.model_name,
            "num_prompt_tokens": NUM_PROMPT_TOKENS,
            "max_new_tokens": what.max_new_tokens,
            "runs": what.runs,
            "bar": BAR,
        },
        "environment": describe(torch.device("cpu")),
    }
    publish(document, what.out, as_json=what.as_json)


def _progress(done: int, total: int) -> None:
    typer.echo(f"preset {done}/{total}", err=True)
