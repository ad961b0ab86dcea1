"""The prompts that `hybrid data generate` answers. Next: hybrid/training/generate.py."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybrid.prompt_files import prompt_field, prompt_rows


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes:
        row: the line's fields.
        where: how errors name it.
    """

    row: dict[str, Any]
    where: str

    @property
    def key(self) -> str:
        """Equal for equal prompts."""
        return prompt_key(self.row)


@dataclass(frozen=True, slots=True)
class Prompts:
    """All prompts of a file, each once: a second answer to the same prompt teaches nothing.

    Attributes:
        items: in the order of the file.
        sha256: of the file.
    """

    items: tuple[Prompt, ...]
    sha256: str


def prompt_key(row: Mapping[str, Any]) -> str:
    """Return what is equal for rows that ask the same, with or without an answer."""
    field = prompt_field(row)
    return json.dumps(None if field is None else row[field], sort_keys=True)


def read_prompts(content: bytes, name: str) -> Prompts:
    """Read prompts, see `hybrid.prompt_files.prompt_rows`.

    Raises:
        ConfigError: not UTF-8, no prompts, or a bad line, named by its number.
    """
    items: dict[str, Prompt] = {}
    for where, row in prompt_rows(content, name):
        prompt = Prompt(row, where)
        items.setdefault(prompt.key, prompt)
    return Prompts(tuple(items.values()), hashlib.sha256(content).hexdigest())
