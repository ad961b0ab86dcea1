"""Training data: what the target itself answered, one JSON object per line.

`hybrid data generate` writes it (hybrid/training/generate.py).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid.errors import ConfigError
from hybrid.models.tokenizer import Tokenizer
from hybrid.training.turns import answer_ids, naming, prompt_ids


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
        path: JSONL with `p` and `r` ids, or texts: `prompt` (or chat `messages`) and `response`.
            A response text ends with the EOS id unless `finish_reason` is "length".
        vocab_size: ids must be below it.
        max_length: prompt and response together.
        tokenizer: needed for texts.

    Raises:
        ConfigError: no such file, no examples, or a bad line, named by its number.
    """
    examples = []
    for where, line in numbered_lines(read_bytes(path), path.name):
        example = to_example(parse(line, where), where, tokenizer, vocab_size)
        check(example, where, vocab_size, max_length)
        examples.append(example)
    if not examples:
        raise ConfigError(f"data: {path} holds no examples, expected one JSON object per line.")
    return examples


def data_sha256(path: Path) -> str:
    """Return the SHA-256 of the data file, by which a run recognises it.

    Raises:
        ConfigError: it cannot be read.
    """
    return hashlib.sha256(read_bytes(path)).hexdigest()


def read_bytes(path: Path) -> bytes:
    """Return what the file holds.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"data: {path} cannot be read: {error.strerror}.") from error


def numbered_lines(content: bytes, name: str) -> list[tuple[str, str]]:
    """Return (how errors name the line, line) of all lines that are not blank.

    Raises:
        ConfigError: not UTF-8.
    """
    try:
        # Not splitlines: a line separator may stand inside a text.
        lines = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"data: {name} is not UTF-8 text: {error}.") from error
    return [(f"{name} line {i}", line) for i, line in enumerate(lines, start=1) if line.strip()]


def parse(line: str, where: str) -> dict[str, Any]:
    """Return the JSON object of a line.

    Raises:
        ConfigError: it is none.
    """
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}.") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: expected an object, got {type(row).__name__}.")
    return row


def to_example(
    row: dict[str, Any], where: str, tokenizer: Tokenizer | None, vocab_size: int
) -> Example:
    """Return the example of a row, see `read_examples`; its ids are not checked yet.

    Raises:
        ConfigError: fields are missing, texts are empty or malformed.
    """
    if isinstance(row.get("p"), list) and isinstance(row.get("r"), list):
        return Example(tuple(row["p"]), tuple(row["r"]))
    response = row.get("response")
    has_prompt = "prompt" in row or "messages" in row
    if tokenizer is None or not has_prompt or not isinstance(response, str):
        raise ConfigError(
            f"{where}: expected an object with ids 'p' and 'r', or, for a model with a tokenizer, "
            "texts 'prompt' and 'response'."
        )
    if not response.strip():
        raise ConfigError(f"{where}: got an empty response, expected text.")
    is_complete = row.get("finish_reason") != "length"
    with naming(where):
        answer = answer_ids(response, tokenizer, is_complete=is_complete)
    return Example(tuple(prompt_ids(row, tokenizer, vocab_size, where)), tuple(answer))


def check(example: Example, where: str, vocab_size: int, max_length: int) -> None:
    """Refuse what cannot be trained on.

    Raises:
        ConfigError: no prompt, fewer than 2 response tokens, too long, or impossible ids.
    """
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
