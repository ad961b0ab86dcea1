"""When an answer is right: a number, a text, code that passes tests, tokens that agree.

Next: hybrid/eval/sandbox.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from hybrid.errors import ConfigError
from hybrid.eval.sandbox import run_tests
from hybrid.types import GenerationResult

# A minus belongs to the number unless it stands between two operands, as in 10-3.
_NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
_FENCE = re.compile(r"```[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
_QUOTES = "\"'`“”‘’«»*"


class Score(NamedTuple):
    """What an answer is worth: 1 right, 0 wrong (agreement: a share); and why, when it is wrong."""

    value: float
    reason: str | None = None


def score(kind: str, expected: Any, result: GenerationResult) -> Score:
    """Score an answer to an item of a task of this kind; `expected` is the item's."""
    if kind == "number":
        found = last_number(result.text)
        return Score(1) if found == expected else Score(0, f"got {found}, expected {expected}")
    if kind == "text":
        line = normalised(result.text)
        is_right = line in {normalised(text) for text in expected}
        return Score(1) if is_right else Score(0, f"got {line!r}, expected {expected[0]!r}")
    if kind == "code":
        reason = run_tests(code_of(result.text), expected)
        return Score(1) if reason is None else Score(0, reason)
    if kind == "tokens":
        return Score(1 if expected is None else agreement(expected, result.token_ids))
    raise ConfigError(f"kind: got {kind!r}, expected number, text, code or tokens.")


def read_number(text: str) -> Decimal | None:
    """Return the number that a text is, None where it is more or something else."""
    match = _NUMBER.fullmatch(text.strip())
    return None if match is None else Decimal(match[0].replace(",", ""))


def last_number(text: str) -> Decimal | None:
    """Return the last number in a text: decimal point, commas between thousands, no exponents."""
    found = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return Decimal(found[-1].replace(",", "")) if found else None


def normalised(text: str) -> str:
    """Return the first line with words, without blanks, quotes and full stop around, in one case.

    Blanks inside count as one.
    """
    line = next((line for line in text.splitlines() if line.strip()), "")
    return " ".join(line.strip().strip(_QUOTES).removesuffix(".").strip(_QUOTES).split()).casefold()


def code_of(text: str) -> str:
    """Return the first fenced block of an answer, all of it where there is none."""
    match = _FENCE.search(text)
    return text if match is None else match[1]


def agreement(expected: Sequence[int], got: Sequence[int]) -> float:
    """Return the share of places with the same token in both, of the longer answer's places."""
    longer = max(len(expected), len(got))
    same = sum(a == b for a, b in zip(expected, got, strict=False))
    return same / longer if longer else 1.0
