"""Which strategies are measured: by name with parameters, and every point of a grid.

Next: hybrid/eval/runner.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from hybrid.config import parse_setting, spell_settings
from hybrid.errors import ConfigError
from hybrid.strategy import Strategy


def given(strategy: Strategy) -> dict[str, Any]:
    """Return the parameters that differ from the preset's own because somebody gave them."""
    return strategy.settings.model_dump(mode="json", exclude_unset=True)


def label(row: Mapping[str, Any]) -> str:
    """Return the strategy of a row and its parameters, as `read_strategies` reads them."""
    return f"{row['strategy']} {spell_settings(row['parameters'])}".rstrip()


def label_of(strategy: Strategy) -> str:
    """Return a strategy in the spelling of `label`."""
    return label({"strategy": strategy.name, "parameters": given(strategy)})


def command_line(row: Mapping[str, Any]) -> str:
    """Return the flags that decode as this row did."""
    settings = (spell_settings({name: value}) for name, value in row["parameters"].items())
    return " ".join([f"--strategy {row['strategy']}", *(f"--set {text}" for text in settings)])


def read_grid(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Return {parameter: its values} of texts such as ``threshold=0.7,0.8`` or ``cache=none,dual``.

    A value that is a list itself is written in JSON: ``name=[1,2],[3]``.

    Raises:
        ConfigError: not of that form, or a parameter that is given twice.
    """
    grid: dict[str, list[Any]] = {}
    for text in texts:
        name, value = parse_setting(text, "--grid")
        if name in grid:
            raise ConfigError(f"--grid: got {name} twice, expected all its values in one.")
        if isinstance(value, str):
            value = value.split(",")
        grid[name] = value if isinstance(value, list) else [value]
        if not grid[name] or "" in grid[name]:
            raise ConfigError(f"--grid: got {text!r}, expected values: {name}=1,2.")
    return grid


def read_strategies(
    names: Sequence[str], settings: Sequence[str] = (), grid: Sequence[str] = ()
) -> list[Strategy]:
    """Return the strategies to measure, each once.

    Args:
        names: presets, each alone or with parameters behind it: ``"fast-dllm threshold=0.8"``.
        settings: ``KEY=VALUE``, more parameters of the only name.
        grid: see `read_grid`; every combination of the values is a strategy.

    Raises:
        ConfigError: an unknown name or parameter, values that the preset refuses (all of them are
            named), or settings beside several names.
    """
    if (settings or grid) and len(names) != 1:
        flag = "--set" if settings else "--grid"
        raise ConfigError(
            f"{flag}: got parameters for {len(names)} strategies, expected one --strategy. For "
            'several, write them behind the name: --strategy "speculative block_size=8".'
        )
    axes = read_grid(grid)
    found: dict[str, Strategy] = {}
    problems: dict[str, None] = {}
    for text in names:
        name, *own = text.split() or [text]
        fixed = dict(parse_setting(part, "--strategy") for part in own)
        fixed |= dict(parse_setting(part, "--set") for part in settings)
        for values in product(*axes.values()):
            try:
                point = dict(zip(axes, values, strict=True))
                strategy = Strategy.preset(name, **{**fixed, **point})
                found.setdefault(label_of(strategy), strategy)
            except ConfigError as error:
                problems.setdefault(str(error))
    if problems:
        raise ConfigError(" ".join(problems))
    return list(found.values())
