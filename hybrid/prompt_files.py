"""Files of prompts: JSON lines or plain text, a prompt a line. Whoever reads one reads it here.

Next: hybrid/prompts.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybrid.errors import ConfigError
from hybrid.models.tokenizer import Tokenizer
from hybrid.prompts import to_token_ids


def read_bytes(path: Path, field: str = "data") -> bytes:
    """Return what the file holds.

    Args:
        path: of the file.
        field: how errors name what the file was given as.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{field}: {path} cannot be read: {error.strerror}.") from error


def numbered_lines(content: bytes, name: str) -> list[tuple[str, str]]:
    """Return (how errors name the line, line) of all lines that are not blank.

    Raises:
        ConfigError: not UTF-8.
    """
    try:
        # Not splitlines: a line separator may stand inside a text.
        lines = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8 text: {error}.") from error
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


def prompt_rows(content: bytes, name: str) -> list[tuple[str, dict[str, Any]]]:
    """Return (how errors name the line, its fields) of every prompt, in the order of the file.

    Args:
        content: of the file: JSON lines with `messages`, `prompt` or `p`, or one text per line.
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
    rows = []
    for where, line in lines:
        row = parse(line, where) if is_json else {"prompt": line.strip()}
        if prompt_field(row) is None:
            raise ConfigError(
                f"{where}: got no prompt, expected text 'prompt', chat 'messages' or ids 'p'."
            )
        rows.append((where, row))
    return rows


def prompt_field(row: Mapping[str, Any], *, has_tokenizer: bool = True) -> str | None:
    """Return the field that holds a row's prompt; None when there is none.

    Chat messages and text go before ids, which belong to one tokenizer.
    """
    names = ("messages", "prompt", "p") if has_tokenizer else ("p", "messages", "prompt")
    return next((name for name in names if row.get(name)), None)


def prompt_ids(
    row: Mapping[str, Any], tokenizer: Tokenizer | None, vocab_size: int, where: str
) -> list[int]:
    """Return the ids of a prompt: chat `messages`, else text `prompt`, else ids `p`.

    Text becomes a chat message where the model chats.

    Args:
        row: a line of a file.
        tokenizer: None when the model has none; only ids are usable then.
        vocab_size: ids must be below it.
        where: how errors name the row.

    Raises:
        ConfigError: empty or malformed, or text without a tokenizer.
    """
    field = prompt_field(row, has_tokenizer=tokenizer is not None)
    prompt = None if field is None else row[field]
    if prompt is None or (isinstance(prompt, str) and not prompt.strip()):
        raise ConfigError(f"{where}: got no prompt, expected 'prompt', 'messages' or 'p'.")
    if isinstance(prompt, str) and tokenizer is not None and tokenizer.has_chat_template:
        prompt = [{"role": "user", "content": prompt}]
    with naming(where):
        return to_token_ids(prompt, tokenizer, vocab_size, where)


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Put `where` in front of errors that do not begin with it."""
    try:
        yield
    except ConfigError as error:
        message = str(error)
        raise ConfigError(message if message.startswith(where) else f"{where}: {message}") from None
