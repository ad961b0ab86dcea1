"""Quality without right answers: how much of its own AR answer a model writes under a strategy.

Next: hybrid/cli/sweep.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybrid.bench.prompts import PROMPTS
from hybrid.eval.cells import Cell
from hybrid.eval.task import Item, Task
from hybrid.prompt_files import prompt_rows, read_bytes

MAX_NEW_TOKENS = 128


def prompt_task(path: Path | None, max_new_tokens: int | None = None) -> Task:
    """Return a task of prompts, of which no right answer is known.

    Args:
        path: a file of prompts; None takes those of `hybrid bench`.
        max_new_tokens: length limit of each answer; None is 128.

    Raises:
        ConfigError: the file cannot be read, is empty, or has a bad line.
    """
    rows: list[tuple[str, Mapping[str, Any]]]
    if path is None:
        rows = [(f"prompt {i}", {"prompt": text}) for i, text in enumerate(PROMPTS)]
    else:
        rows = list(prompt_rows(read_bytes(path, "prompts"), path.name))
    limit = MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens
    items = tuple(Item(where, row, None, limit) for where, row in rows)
    return Task("prompts" if path is None else path.stem, "tokens", items)


def expecting(task: Task, answers: Cell) -> Task:
    """Return the task with the tokens of a cell as what is right."""
    tokens = [tuple(item["tokens"]) for item in answers.items]
    pairs = zip(task.items, tokens, strict=True)
    return replace(task, items=tuple(replace(item, expected=ids) for item, ids in pairs))
