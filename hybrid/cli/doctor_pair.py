"""``hybrid doctor --target T --drafter D``: is the drafter the target's, and is it served right."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hybrid.cli.options import progress_bar

if TYPE_CHECKING:
    from hybrid.pair.diagnosis import Diagnosis


def check_pair(
    target: str,
    drafter: Path,
    *,
    prompts: Path | None,
    max_new_tokens: int,
    device: str,
    as_json: bool,
) -> None:
    """Print what was found; the exit code is 1 where something is wrong.

    Raises:
        HybridError: the target, the drafter's files or the prompts cannot be read.
    """
    from hybrid.bench.prompts import read_prompts
    from hybrid.pair.diagnosis import Measuring, diagnose
    from hybrid.pair.finding import has_problem
    from hybrid.tui.text import clean

    asked = None if prompts is None else [prompt.content for prompt in read_prompts(prompts)]
    with progress_bar() as report:
        how = Measuring(asked, max_new_tokens, device)
        found = diagnose(target, drafter, how, progress=report)
    is_wrong = has_problem(found.findings)
    if as_json:
        typer.echo(json.dumps({**_as_dict(found), "ok": not is_wrong}))
    else:
        for line in _lines(found, is_wrong):
            typer.echo(clean(line))
    raise typer.Exit(1 if is_wrong else 0)


def _as_dict(found: Diagnosis) -> dict[str, Any]:
    return {
        "findings": [asdict(finding) for finding in found.findings],
        "engines": [
            {
                "engine": trace.engine,
                "acceptance_length": trace.acceptance_length,
                "acceptance_by_position": trace.by_position,
                "num_passes": sum(trace.histogram),
            }
            for trace in found.traces
        ],
        "skipped": found.skipped,
    }


def _lines(found: Diagnosis, is_wrong: bool) -> Sequence[str]:
    lines = [f"{f.level.value:<8} {f.check}: {f.text}" for f in found.findings]
    if found.traces:
        lines += ["", "accepted, by position in the draft (share of passes), and tokens per pass:"]
    for trace in found.traces:
        shares = " ".join(f"{100 * share:4.0f}%" for share in trace.by_position)
        lines.append(f"  {trace.engine:<22} {shares}   {trace.acceptance_length:.2f}")
    lines += [f"  {engine:<22} not measured: {why}" for engine, why in found.skipped.items()]
    return [*lines, "", "Something is wrong." if is_wrong else "The pair is sound."]
