"""`Finding`: one thing that was checked, and what came out. Next: hybrid/pair/checks.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Level(str, Enum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check says.

    Attributes:
        check: its name.
        level: a problem loses acceptance somewhere; a note is worth a look.
        text: what was found and what to do, in plain words.
    """

    check: str
    level: Level
    text: str


def has_problem(findings: Sequence[Finding]) -> bool:
    """Return whether any of them is a problem."""
    return any(finding.level is Level.PROBLEM for finding in findings)
