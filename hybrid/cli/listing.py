"""``hybrid list``: the names that other commands accept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any

import typer

EXAMPLES = """Examples:

  hybrid list

  hybrid list families

  hybrid list presets --json
"""

KINDS = ("drafters", "verifiers", "presets", "families")
_FAMILY_COLUMNS = ("context", "cache", "verifies", "default strategy")


def list_names(
    kind: Annotated[
        str | None, typer.Argument(help=f"One of {', '.join(KINDS)}; all if left out.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List drafters, verifiers, strategies (presets) and model families."""
    from hybrid.errors import ConfigError, did_you_mean

    if kind is not None and kind not in KINDS:
        raise ConfigError(f"list: got {kind!r}.{did_you_mean(kind, KINDS)}")
    kinds = KINDS if kind is None else (kind,)
    makers = {"families": _families, "presets": _presets}
    entries = {name: makers[name]() if name in makers else _abouts(name) for name in kinds}
    if as_json:
        typer.echo(json.dumps(entries))
        return
    for name in kinds:
        typer.echo(f"{name}:")
        lines = _preset_lines if kind == "presets" else _lines
        for line in lines(entries[name]):
            typer.echo(f"  {line}".rstrip())


def _lines(entries: Mapping[str, Any]) -> list[str]:
    """Return one line per name; families have columns, and a line with their titles."""
    rows = [
        (name, about) if isinstance(about, str) else (name, *_cells(about))
        for name, about in entries.items()
    ]
    if rows and len(rows[0]) > 2:
        rows.insert(0, ("", *_FAMILY_COLUMNS))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)) for row in rows]


def _cells(about: Mapping[str, Any]) -> tuple[str, ...]:
    if "about" in about:
        return (about["about"],)
    verifies = "yes" if about["can_verify"] else "no"
    return about["context"], about["cache"], verifies, about["default_strategy"]


def _families() -> dict[str, dict[str, Any]]:
    """Return what the weights of each family can do; see `Backbone` for the words."""
    from hybrid.models.family_table import FAMILIES

    return {
        name: {
            "context": family.context.value,
            "cache": "exact" if family.has_exact_cache else "approximate",
            "can_verify": family.can_verify,
            "default_strategy": family.default_strategy,
        }
        for name, family in FAMILIES.items()
    }


def _presets() -> dict[str, dict[str, Any]]:
    """Return what each preset is, what models it is for, and its parameters with their defaults."""
    from hybrid import registry
    from hybrid.errors import ConfigError

    found: dict[str, dict[str, Any]] = {}
    for name in registry.names("preset"):
        found[name] = {"about": _about("preset", name)}
        with suppress(ConfigError):  # one of another package; `about` says what is wrong with it
            settings = registry.load("preset", name)()
            found[name]["models"] = _models(settings)
            found[name]["parameters"] = settings.model_dump(mode="json")
    return found


def _models(settings: Any) -> str:
    """Return which models a preset is for, in words."""
    from hybrid.decode.policies import DenoisePreset
    from hybrid.strategy import VerifiedPreset

    if isinstance(settings, VerifiedPreset):
        return "models that verify"
    if isinstance(settings, DenoisePreset):
        kinds = " or ".join(context.value for context in settings.contexts)
        return f"models that fill masks, {kinds}"
    return "models that decode by their own code"


def _preset_lines(entries: Mapping[str, Any]) -> list[str]:
    """Return a few lines per preset: what it is, its models, its parameters as `--set` has them."""
    from hybrid.config import spell_settings

    lines, width = [], max(map(len, entries))
    for name, entry in entries.items():
        texts = [entry["about"]]
        if "models" in entry:
            texts += [f"For {entry['models']}.", spell_settings(entry["parameters"])]
        lines += [f"{'' if i else name:<{width}}  {text}" for i, text in enumerate(texts) if text]
    return lines


def _abouts(kinds: str) -> dict[str, str]:
    from hybrid import registry

    kind = kinds.removesuffix("s")
    return {name: _about(kind, name) for name in registry.names(kind)}


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
