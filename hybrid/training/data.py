"""Training data: what the target itself answered, one JSON object per line."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid.errors import ConfigError
from hybrid.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation: prompt ids and the target's response ids."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]

    @property
    def tokens(self) -> list[int]:
        """Prompt and response."""
        return [*self.prompt, *self.response]


def read_examples(
    path: Path, *, vocab_size: int, max_length: int, tokenizer: Tokenizer | None = None
) -> list[Example]:
    """Read and check every line.

    Args:
        path: JSONL with `p` and `r` ids, or `prompt` and `response` texts (chat template).
        vocab_size: ids must be below it.
        max_length: prompt and response together.
        tokenizer: needed for texts.

    Raises:
        ConfigError: no such file, no examples, or a bad line, named by its number.
    """
    try:
        lines = _read(path).decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"data: {path} is not UTF-8 text: {error}.") from error
    examples = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            example = _example(line, f"{path.name} line {number}", tokenizer)
            _check(example, f"{path.name} line {number}", vocab_size, max_length)
            examples.append(example)
    if not examples:
        raise ConfigError(f"data: {path} holds no examples, expected one JSON object per line.")
    return examples


def data_sha256(path: Path) -> str:
    """Return the SHA-256 of the data file, by which a run recognises it.

    Raises:
        ConfigError: it cannot be read.
    """
    return hashlib.sha256(_read(path)).hexdigest()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"data: {path} cannot be read: {error.strerror}.") from error


def _example(line: str, where: str, tokenizer: Tokenizer | None) -> Example:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error}.") from error
    if isinstance(row, dict) and isinstance(row.get("p"), list) and isinstance(row.get("r"), list):
        return Example(tuple(row["p"]), tuple(row["r"]))
    if isinstance(row, dict) and tokenizer is not None:
        prompt, response = row.get("prompt"), row.get("response")
        if isinstance(prompt, str) and isinstance(response, str):
            ids = tokenizer.chat([{"role": "user", "content": prompt}])
            return Example(tuple(ids), tuple(tokenizer.encode(response)))
    raise ConfigError(
        f"{where}: expected an object with ids 'p' and 'r', or, for a model with a tokenizer, "
        "texts 'prompt' and 'response'."
    )


def _check(example: Example, where: str, vocab_size: int, max_length: int) -> None:
    if not example.prompt or len(example.response) < 2:
        raise ConfigError(
            f"{where}: got {len(example.prompt)} prompt and {len(example.response)} response "
            "tokens, expected at least 1 and 2."
        )
    if len(example.tokens) > max_length:
        raise ConfigError(
            f"{where}: got {len(example.tokens)} tokens, expected at most {max_length} "
            "(max_length, or the model's context). Cut the response."
        )
    for token in example.tokens:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ConfigError(
                f"{where}: got {token!r}, expected token ids from 0 to {vocab_size - 1}."
            )
