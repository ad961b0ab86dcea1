"""What counts as right, by a table of answers as models write them."""

from __future__ import annotations

from decimal import Decimal

import pytest

from hybrid.errors import ConfigError
from hybrid.eval.scorers import agreement, code_of, last_number, normalised, read_number, score
from hybrid.types import GenerationResult


def said(text: str, *tokens: int) -> GenerationResult:
    return GenerationResult(text, tokens, "stop")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("2 + 3 = 5", "5"),
        ("The answer is 42.", "42"),
        ("so it is -7", "-7"),
        ("\N{MINUS SIGN}7", "-7"),
        ("10-3", "3"),  # between two operands it is no sign
        ("(2)-3", "3"),
        ("costs 1,234,567.50 euros", "1234567.50"),
        ("3, 4", "4"),
        ("12,3456", "3456"),
        ("0.10 * 50 = 5.00", "5"),
        ("**12**", "12"),
        ("x=007", "7"),
    ],
)
def test_the_last_number(text, number) -> None:
    assert last_number(text) == Decimal(number)


def test_no_number() -> None:
    assert last_number("none at all") is None
    assert read_number("12 apples") is None
    assert read_number(" -1,000.5 ") == Decimal("-1000.5")


def test_number() -> None:
    assert score("number", Decimal(5), said("it is 5.0")).value == 1
    wrong = score("number", Decimal(5), said("5 or 6"))
    assert wrong == (0, "got 6, expected 5")
    assert score("number", Decimal(0), said("")).value == 0


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("Ann Lee", True),
        ('\n  "ann  lee."\nBecause she says so.', True),
        ("**Ann Lee**.", True),
        ("Ann Lee Smith", False),
        ("The name is Ann Lee", False),
        ("", False),
    ],
)
def test_text(text, is_right) -> None:
    found = score("text", ("Ann Lee", "Lee"), said(text))
    assert found.value == is_right
    assert (found.reason is None) == is_right


def test_what_normalising_leaves() -> None:
    assert normalised(" 14:20 ") == "14:20"
    assert normalised("anna@example.org.") == "anna@example.org"
    assert normalised("") == ""


def test_code_is_the_first_block() -> None:
    assert code_of("Here:\n```python\nx = 1\n```\nand\n```\nx = 2\n```") == "x = 1\n"
    assert code_of("```\nx = 1\nwhile") == "x = 1\nwhile"  # cut by the length limit
    assert code_of("x = 1") == "x = 1"


def test_code_that_passes_and_code_that_fails() -> None:
    answer = said("```python\ndef add(a, b):\n    return a + b\n```\nprint(add)")
    assert score("code", "assert add(2, 3) == 5", answer) == (1, None)
    wrong = score("code", "x = 1\nassert add(2, 3) == 6", answer)
    assert wrong == (0, "tests: AssertionError: assert add(2, 3) == 6")


def test_agreement_is_the_share_of_equal_places() -> None:
    assert agreement([1, 2, 3, 4], [1, 9, 3, 4]) == 0.75
    assert agreement([1, 2], [1, 2, 3, 4]) == 0.5  # what is missing does not agree
    assert agreement([], []) == 1
    assert score("tokens", (1, 2), said("", 1, 3)).value == 0.5
    assert score("tokens", None, said("", 1, 3)).value == 1


def test_unknown_kind() -> None:
    with pytest.raises(ConfigError, match="kind: got 'maths'"):
        score("maths", 1, said("1"))
