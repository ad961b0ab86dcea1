"""The prompts that `hybrid data generate` answers. Next: hybrid/training/generate.py."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybrid.errors import ConfigError
from hybrid.training.data import numbered_lines, parse
from hybrid.training.turns import prompt_field


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
    """Read prompts: JSON lines with `messages`, `prompt` or `p`, or one text per line.

    Args:
        content: of the file.
        name: of the file. ".json" and ".jsonl" hold objects, ".txt" texts; elsewhere the first
            line tells.

    Raises:
        ConfigError: not UTF-8, no prompts, or a bad line, named by its number.
    """
    lines = numbered_lines(content, name)
    if not lines:
        raise ConfigError(f"prompts: {name} is empty, expected one prompt per line.")
    is_json = name.endswith((".json", ".jsonl")) or (
        not name.endswith(".txt") and lines[0][1].lstrip().startswith("{")
    )
    items: dict[str, Prompt] = {}
    for where, line in lines:
        row = parse(line, where) if is_json else {"prompt": line.strip()}
        if prompt_field(row) is None:
            raise ConfigError(
                f"{where}: got no prompt, expected text 'prompt', chat 'messages' or ids 'p'."
            )
        prompt = Prompt(row, where)
        items.setdefault(prompt.key, prompt)
    return Prompts(tuple(items.values()), hashlib.sha256(content).hexdigest())
