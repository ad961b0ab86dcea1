"""A cell: one task under one strategy with one setting. Finished cells are kept in a file.

So a run that was stopped goes on where it was: a cell is measured once for the same model,
settings, questions, machine and revision. Next: hybrid/eval/runner.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid.errors import ConfigError

_OF_A_RUN = ("date", "peak_memory_mib")  # what differs between two runs of the same


@dataclass(frozen=True, slots=True)
class Cell:
    """What was measured.

    Attributes:
        row: the numbers, JSON types.
        items: per question its score, why it is wrong, the answer's text and tokens, its time.
    """

    row: dict[str, Any]
    items: list[dict[str, Any]]


class Cells:
    """Finished cells, in memory and in a file of JSON lines; each line is written at once.

    Attributes:
        is_reusing: whether cells of earlier runs count. With local changes in the checkout they do
            not: nobody can say whether the code is the same.
    """

    def __init__(self, path: Path | None, environment: Mapping[str, Any], **model: Any) -> None:
        """Read what there is.

        Args:
            path: of the file; None keeps nothing.
            environment: where and with what is measured, see `hybrid.bench.environment`.
            **model: what names and shapes the model: its options, the state of its files.

        Raises:
            ConfigError: the file cannot be read.
        """
        self._path, self._environment = path, dict(environment)
        same = {k: v for k, v in environment.items() if k not in _OF_A_RUN}
        self._identity = {"environment": same, **model}
        self.is_reusing = environment.get("is_dirty") is not True
        self._known: dict[str, Cell] = {}
        if path is not None and path.exists() and self.is_reusing:
            self._known = _read(path)

    def key(self, **what: Any) -> str:
        """Return what a cell is known by; `what` says what was measured, the rest is known."""
        text = json.dumps({**self._identity, **what}, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def get(self, key: str) -> Cell | None:
        """Return a cell that is finished."""
        return self._known.get(key)

    def add(self, key: str, cell: Cell) -> None:
        """Keep a finished cell.

        Raises:
            ConfigError: the file cannot be written.
        """
        self._known[key] = cell
        if self._path is None:
            return
        line = {"key": key, "row": cell.row, "items": cell.items, "environment": self._environment}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab+") as file:
                # A run that was killed may have left half a line.
                if file.tell() and not _ends_line(file):
                    file.write(b"\n")
                file.write(json.dumps(line).encode() + b"\n")
        except OSError as error:
            raise ConfigError(f"out: {self._path} cannot be written: {error}") from error


def files_stamp(*paths: str | Path | None) -> str:
    """Return what changes when a file in these folders, or one of these files, is replaced."""
    found = []
    for path in (Path(p) for p in paths if p is not None):
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        for file in files:
            about = file.stat()
            found.append([str(file), about.st_size, about.st_mtime_ns])
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16] if found else ""


def _read(path: Path) -> dict[str, Cell]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"out: {path} cannot be read: {error}") from error
    found = {}
    for line in lines:
        try:
            row = json.loads(line)
            found[row["key"]] = Cell(row["row"], row["items"])
        except (ValueError, KeyError, TypeError):
            continue  # half a line: that cell is measured again
    return found


def _ends_line(file: Any) -> bool:
    file.seek(-1, 2)
    return bool(file.read(1) == b"\n")
