"""Tasks: files of questions with what a right answer is, a JSON line each. Three small ones ship.

    {"kind": "number", "prompt": "What is 2 + 3?", "answer": 5}

The first line's `kind` is that of the file and decides how answers are scored. Next:
hybrid/eval/scorers.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from hybrid.config import Config
from hybrid.errors import ConfigError, did_you_mean
from hybrid.eval.scorers import read_number
from hybrid.prompt_files import naming, prompt_rows, read_bytes

Kind = Literal["number", "text", "code"]
MAX_NEW_TOKENS: Mapping[str, int] = {"number": 64, "text": 32, "code": 160}
"""Length limit of an answer by the task's kind, where its line has none."""

_PROMPT = ("prompt", "messages", "p")
_FOLDER = Path(__file__).parent / "tasks"
BUILT_IN = tuple(sorted(path.stem for path in _FOLDER.glob("*.jsonl")))
"""Names of the tasks that ship."""


class _Line(Config):
    """The fields that a line may have; `prompt_files` says what a prompt may be."""

    kind: Kind | None = None
    prompt: Any = None
    messages: Any = None
    p: Any = None
    answer: Any = None
    tests: Any = None
    max_new_tokens: Annotated[int, Field(ge=1)] | None = None


@dataclass(frozen=True, slots=True)
class Item:
    """One question.

    Attributes:
        where: how errors name its line.
        prompt: the fields that hold it.
        expected: what a right answer is: a number, texts that are right, tests (code), or token
            ids; None where every answer is right.
        max_new_tokens: length limit of the answer.
    """

    where: str
    prompt: Mapping[str, Any]
    expected: Any
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class Task:
    """Questions that are scored alike.

    Attributes:
        name: of the file, without its ending.
        kind: "number", "text", "code", or "tokens" (as much as agrees with given token ids).
        items: the questions.
    """

    name: str
    kind: str
    items: tuple[Item, ...]

    @property
    def digest(self) -> str:
        """Equal for tasks with the same questions, answers and limits."""
        parts = [[item.prompt, str(item.expected), item.max_new_tokens] for item in self.items]
        text = json.dumps([self.kind, parts], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def first(self, limit: int | None) -> Task:
        """Return the task with its first questions only; None keeps all."""
        return replace(self, items=self.items[:limit])


def read_tasks(names: Sequence[str], max_new_tokens: int | None = None) -> list[Task]:
    """Return tasks by name or file; all that ship if there are no names.

    Args:
        names: one of `BUILT_IN`, or the path of a file.
        max_new_tokens: length limit in place of those of lines and kinds.

    Raises:
        ConfigError: no such task, two of one name, or a bad line, named by its number.
    """
    tasks = [_read(name, max_new_tokens) for name in names or BUILT_IN]
    found = [task.name for task in tasks]
    twice = next((name for name in found if found.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"tasks: got {twice!r} twice, expected names of their own. Rename one.")
    return tasks


def _read(name: str, max_new_tokens: int | None) -> Task:
    path = _FOLDER / f"{name}.jsonl" if name in BUILT_IN else Path(name)
    if not path.is_file():
        raise ConfigError(
            f"tasks: got {name!r}, which is neither a file nor a task that ships."
            f"{did_you_mean(name, BUILT_IN)}"
        )
    kind: str | None = None
    items = []
    for where, row in prompt_rows(read_bytes(path, "tasks"), path.name):
        with naming(where):
            line = _Line(**row)
            kind = kind or line.kind
            if kind is None:
                kinds = ", ".join(get_args(Kind))
                raise ConfigError(f"got no 'kind', expected one in the first line: {kinds}.")
            if line.kind not in (None, kind):
                raise ConfigError(
                    f"kind: got {line.kind!r}, expected {kind!r} as in the first line. A file "
                    "holds one kind."
                )
            limit = max_new_tokens or line.max_new_tokens or MAX_NEW_TOKENS[kind]
            prompt = {key: value for key, value in row.items() if key in _PROMPT}
            items.append(Item(where, prompt, _expected(kind, line), limit))
    assert kind is not None  # a file without lines is refused by `prompt_rows`
    return Task(path.stem, kind, tuple(items))


def _expected(kind: str, line: _Line) -> Any:
    """Return what a right answer is.

    Raises:
        ConfigError: missing, or none of this kind.
    """
    field, other = ("tests", "answer") if kind == "code" else ("answer", "tests")
    value = getattr(line, field)
    if getattr(line, other) is not None:
        raise ConfigError(f"got {other!r}, expected {field!r} alone in a task of kind {kind!r}.")
    if kind == "number":
        number = None if isinstance(value, bool) else read_number(str(value))
        if number is None:
            raise ConfigError(f"answer: got {value!r}, expected a number such as 12.5.")
        return number
    if kind == "text":
        texts = value if isinstance(value, list) else [value]
        if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
            raise ConfigError(f"answer: got {value!r}, expected a text or a list of texts.")
        return tuple(texts)
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"tests: got {value!r}, expected Python statements such as asserts.")
    try:
        compile(value, "<tests>", "exec")
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"tests: not Python: {error}.") from error
    return value
