"""``hybrid calibrate``: find the thresholds that keep a promise about unverified tokens.

The work is in hybrid/calibration/.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from hybrid.cli import options

EXAMPLES = """Examples:

  hybrid calibrate --data prompts.jsonl --risk 0.02 --output profile.json

  hybrid generate "Why is the sky blue?" --strategy hybrid --set risk=0.02
    --set profile=profile.json

  hybrid calibrate --data others.jsonl --check profile.json
"""


@dataclass(frozen=True)
class CalibrationOptions:
    """What is promised, on which prompts."""

    data: Annotated[
        Path,
        typer.Option(
            exists=True, dir_okay=False, help="JSON lines or text, a prompt a line; 700 or more."
        ),
    ]
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", dir_okay=False, help="Profile to write; resumed if begun."),
    ] = None
    check: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Only measure this profile on the prompts."),
    ] = None
    risk: Annotated[
        float, typer.Option(help="Share of unverified tokens that AR would not have chosen.")
    ] = 0.02
    delta: Annotated[float, typer.Option(help="Chance that the promise is wrong.")] = 0.05
    cost: Annotated[
        Literal["forwards", "measured"],
        typer.Option(help="What the router weighs tokens against; the profile holds for it alone."),
    ] = "forwards"
    block_size: Annotated[
        int | None, typer.Option(help="Anchor and drafted tokens; default: the drafter's choice.")
    ] = None
    domain: Annotated[str, typer.Option(help="What the prompts are, for the record.")] = "general"
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", help="The profile holds for it alone.")
    ] = 0.0
    fit_share: Annotated[
        float, typer.Option(help="Of the prompts, for fitting; the others, which follow, test.")
    ] = 0.4
    num_thresholds: Annotated[
        int, typer.Option(min=1, help="How many thresholds to test at most.")
    ] = 2
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=2, help="Length of each answer.")
    ] = 64
    limit: Annotated[int | None, typer.Option(min=1, help="Use the first prompts only.")] = None
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="PNG of the evidence (needs matplotlib).")
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False


@options.flatten
def calibrate(what: CalibrationOptions, model: options.ModelOptions) -> None:
    """Calibrate strategy "hybrid" for a risk above 0, per model, adapter and domain.

    Nothing is assumed about the model: thresholds are tested on prompts of your own, and one is
    accepted only if its disagreement with AR is below the risk with confidence 1 - delta.
    """
    from hybrid.calibration.calibrate import CalibrationConfig, calibrate_profile
    from hybrid.calibration.check import check_profile
    from hybrid.calibration.tables import check_table, profile_table
    from hybrid.errors import ConfigError
    from hybrid.pictures import new_figure
    from hybrid.prompt_files import prompt_ids, prompt_rows, read_bytes

    if (what.output is None) == (what.check is None):
        raise ConfigError("hybrid calibrate: expected --output or --check, one of them.")
    if what.plot is not None:
        new_figure(1, 1)  # without matplotlib it is refused now, not in the end
    config = CalibrationConfig(
        risk=what.risk,
        delta=what.delta,
        domain=what.domain,
        cost=what.cost,
        block_size=what.block_size,
        temperature=what.temperature,
        fit_share=what.fit_share,
        num_thresholds=what.num_thresholds,
        max_new_tokens=what.max_new_tokens,
    )
    decoder = options.load_decoder(model)
    rows = prompt_rows(read_bytes(what.data), what.data.name)[: what.limit]
    vocab_size = decoder.backbone.vocab_size
    prompts = [prompt_ids(row, decoder.tokenizer, vocab_size, where) for where, row in rows]
    with options.progress_bar() as report:
        if what.check is not None:
            document = check_profile(
                decoder,
                prompts,
                what.check,
                max_new_tokens=what.max_new_tokens,
                progress=report,
            )
            typer.echo(json.dumps(document) if what.as_json else check_table(document))
            return
        assert what.output is not None
        profile = calibrate_profile(decoder, prompts, config, what.output, report)
    if what.plot is not None:
        from hybrid.calibration.plot import plot_profile

        plot_profile(profile, what.plot)
    typer.echo(profile.model_dump_json() if what.as_json else profile_table(profile))
