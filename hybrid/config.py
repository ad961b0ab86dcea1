"""Validated configuration objects and the environment variables that the project reads.

Nothing else reads ``os.environ``; docs/environment.md lists the variables.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from hybrid.errors import ConfigError, did_you_mean


class Config(BaseModel):
    """A frozen pydantic model whose errors are `ConfigError` with a did-you-mean."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    def __init__(self, /, **data: Any) -> None:
        """Validate `data`.

        Raises:
            ConfigError: an unknown key, or a value outside its range.
        """
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ConfigError(_explain(type(self), error)) from None

    def replace(self, **changes: Any) -> Any:
        """Return a validated copy with `changes` applied.

        Raises:
            ConfigError: as the constructor.
        """
        return type(self)(**{**self.model_dump(), **changes})


def _explain(cls: type[BaseModel], error: ValidationError) -> str:
    parts = []
    for item in error.errors():
        where = ".".join(str(p) for p in item["loc"]) or cls.__name__
        if item["type"] == "extra_forbidden":
            hint = did_you_mean(where, cls.model_fields)
            parts.append(f"{cls.__name__} has no parameter {where!r}.{hint}")
        elif item["type"] == "missing":
            parts.append(f"{where}: got nothing, expected a value.")
        elif item["type"] == "value_error":
            parts.append(f"{where}: {item['ctx']['error']}")
        else:
            expected = item["msg"].removeprefix("Input should be ")
            parts.append(f"{where}: got {item['input']!r}, expected {expected}.")
    return " ".join(parts)


def parse_setting(text: str, where: str) -> tuple[str, Any]:
    """Return the name and the value of ``KEY=VALUE``: JSON, or `1,2` for a list, or plain text.

    Raises:
        ConfigError: there is no name or no sign; it begins with `where`.
    """
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise ConfigError(f"{where}: got {text!r}, expected KEY=VALUE, as in seed=1.")
    literals = [value, f"[{value}]"] if "," in value else [value]
    for literal in literals:
        with suppress(json.JSONDecodeError):
            return name, json.loads(literal)
    return name, value


def spell_settings(values: Mapping[str, Any]) -> str:
    """Return settings as `parse_setting` reads them, separated by blanks."""
    return " ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in values.items()
    )


def checks_enabled() -> bool:
    """Return whether nouns check their own shapes (``HYBRID_CHECKS=1``; on in the tests)."""
    return os.environ.get("HYBRID_CHECKS", "") == "1"


def poison_enabled() -> bool:
    """Return whether kernels fill their outputs first (``HYBRID_POISON=1``; in their tests)."""
    return os.environ.get("HYBRID_POISON", "") == "1"


def cuda_graphs_enabled() -> bool:
    """Return whether passes are recorded and replayed on a GPU (``HYBRID_CUDA_GRAPHS=0``: not)."""
    return os.environ.get("HYBRID_CUDA_GRAPHS", "") != "0"


def interprets_triton() -> bool:
    """Return whether Triton interprets its kernels on the CPU (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in {"1", "true", "yes", "on", "y"}


def is_offline() -> bool:
    """Return whether network access is forbidden (``HF_HUB_OFFLINE`` or ``HYBRID_OFFLINE``)."""
    names = ("HF_HUB_OFFLINE", "HYBRID_OFFLINE")
    return any(os.environ.get(n, "").lower() in {"1", "true", "yes", "on"} for n in names)


def vllm_python() -> str | None:
    """Return the Python that has vLLM (``HYBRID_VLLM_PYTHON``); None where nobody says."""
    return os.environ.get("HYBRID_VLLM_PYTHON") or None


def subprocess_environment(**changes: str) -> dict[str, str]:
    """Return this process's environment with `changes`, for a child process."""
    return {**os.environ, **changes}


def cache_dir() -> Path:
    """Return the folder for converted models (``HYBRID_CACHE_DIR``, else the XDG cache)."""
    override = os.environ.get("HYBRID_CACHE_DIR")
    if override:
        return Path(override).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hybrid-decoder"


def state_dir() -> Path:
    """Return the folder for chat history (``HYBRID_STATE_DIR``, else the XDG state folder)."""
    override = os.environ.get("HYBRID_STATE_DIR")
    if override:
        return Path(override).expanduser()
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "hybrid-decoder"
