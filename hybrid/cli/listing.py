"""``hybrid list``: the names that other commands accept."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

EXAMPLES = """Examples:

  hybrid list

  hybrid list --json
"""

_STRATEGIES = {
    "ar": "One token per forward: the baseline.",
    "speculative": "Diffusion drafts, the same weights verify; output as ar.",
    "ngram": "Copies from the text so far, then verifies; output as ar.",
    "auto": "Drafts only while that is the faster way here; output as ar.",
}


def list_names(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List drafters, verifiers, model families and strategies (presets)."""
    names = _names()
    if as_json:
        typer.echo(json.dumps(names))
        return
    for kind, entries in names.items():
        typer.echo(f"{kind}:")
        width = max(map(len, entries), default=0)
        for name, about in entries.items():
            typer.echo(f"  {name:<{width}}  {about}".rstrip())


def _names() -> dict[str, dict[str, str]]:
    """Return {kind: {name: one line}}."""
    from hybrid import registry
    from hybrid.decoder import HybridDecoder
    from hybrid.models.families import FAMILIES

    return {
        kind + "s": {name: _about(kind, name) for name in registry.names(kind)}
        for kind in ("drafter", "verifier")
    } | {
        "families": dict.fromkeys(FAMILIES, ""),
        "strategies": {name: _STRATEGIES.get(name, "") for name in HybridDecoder.strategies},
    }


def _about(kind: str, name: str) -> str:
    """Return the first line of the class's docstring; for a verifier, also what it guarantees."""
    from hybrid import registry
    from hybrid.errors import ConfigError

    try:
        found: Any = registry.load(kind, name)
    except ConfigError as error:
        return str(error)
    line = (found.__doc__ or "").strip().split("\n")[0]
    if kind == "verifier":
        line += " (lossless)" if found.lossless else " (lossy)"
    return line
