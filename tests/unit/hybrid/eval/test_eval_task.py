"""The tasks that ship are sound, files are read, and a bad line is named."""

from __future__ import annotations

from decimal import Decimal

import pytest
from answering import task_file

from hybrid.errors import ConfigError
from hybrid.eval.sandbox import run_tests
from hybrid.eval.task import BUILT_IN, MAX_NEW_TOKENS, read_tasks

# A right answer to each code question, in the order of the file.
SOLUTIONS = """
add = lambda a, b: a + b
subtract = lambda a, b: a - b
multiply = lambda a, b: a * b
square = lambda x: x * x
is_even = lambda n: n % 2 == 0
largest = max
total = sum
reverse = lambda text: text[::-1]
is_palindrome = lambda text: text == text[::-1]
count_vowels = lambda text: sum(c in "aeiou" for c in text)
factorial = lambda n: 1 if n == 0 else n * factorial(n - 1)
fibonacci = lambda n: n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
is_prime = lambda n: n > 1 and all(n % d for d in range(2, n))
average = lambda numbers: sum(numbers) / len(numbers)
gcd = lambda a, b: a if b == 0 else gcd(b, a % b)
to_upper = str.upper
count_words = lambda text: len(text.split())
unique = lambda items: list(dict.fromkeys(items))
evens = lambda numbers: [n for n in numbers if n % 2 == 0]
celsius_to_fahrenheit = lambda c: c * 9 / 5 + 32
clamp = lambda x, low, high: max(low, min(x, high))
flatten = lambda lists: [item for own in lists for item in own]
"""


def test_what_ships() -> None:
    tasks = read_tasks([])
    assert [(task.name, task.kind) for task in tasks] == [
        ("arithmetic", "number"),
        ("code", "code"),
        ("extraction", "text"),
    ]
    assert [task.name for task in tasks] == list(BUILT_IN)
    assert {task.name: len(task.items) for task in tasks} == {
        "arithmetic": 40,
        "code": 22,
        "extraction": 30,
    }
    # Denoising presets need whole blocks of up to 32.
    assert all(limit % 32 == 0 for limit in MAX_NEW_TOKENS.values())


def test_every_code_question_has_tests_that_a_right_answer_passes_and_no_answer_fails() -> None:
    (task,) = read_tasks(["code"])
    names = [line.split()[0] for line in SOLUTIONS.split("\n") if line]
    asked = [item.prompt["prompt"].split("function ")[1].split("(")[0] for item in task.items]
    assert asked == names
    together = "\n".join(item.expected for item in task.items)
    assert run_tests(SOLUTIONS, together) is None
    for name, item in zip(names, task.items, strict=True):
        assert "assert" in item.expected
        assert f"{name}(" in item.expected


def test_extraction_answers_stand_in_their_texts() -> None:
    (task,) = read_tasks(["extraction"])
    for item in task.items:
        question = item.prompt["messages"][-1]["content"]
        text = question.split("\n")[0].removeprefix("Text: ").casefold()
        assert any(answer.casefold() in text for answer in item.expected), question
        shown = [m["content"] for m in item.prompt["messages"][:-1] if m["role"] == "user"]
        assert question not in shown


def test_a_file_of_ones_own(tmp_path) -> None:
    path = task_file(
        tmp_path,
        "mine",
        {"kind": "number", "prompt": "2 + 3?", "answer": "5.0", "max_new_tokens": 8},
        {"p": [3, 4], "answer": -1},
    )
    (task,) = read_tasks([path])
    assert (task.name, task.kind) == ("mine", "number")
    assert [item.expected for item in task.items] == [Decimal(5), Decimal(-1)]
    assert [item.max_new_tokens for item in task.items] == [8, MAX_NEW_TOKENS["number"]]
    assert [item.prompt for item in task.items] == [{"prompt": "2 + 3?"}, {"p": [3, 4]}]
    assert [item.max_new_tokens for item in read_tasks([path], 5)[0].items] == [5, 5]
    assert len(task.first(1).items) == 1
    assert task.first(None) == task


def test_the_digest_changes_with_what_is_asked(tmp_path) -> None:
    row = {"kind": "text", "prompt": "Who?", "answer": ["Ann", "ann"]}
    (task,) = read_tasks([task_file(tmp_path, "one", row)])
    (same,) = read_tasks([task_file(tmp_path, "two", row)])
    assert task.digest == same.digest
    others = [{**row, "answer": "Bob"}, {**row, "prompt": "What?"}, {**row, "max_new_tokens": 3}]
    for other in others:
        assert read_tasks([task_file(tmp_path, "one", other)])[0].digest != task.digest


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "a", "answer": 1}], r"bad.jsonl line 1: got no 'kind', expected one"),
        ([{"kind": "maths", "prompt": "a", "answer": 1}], r"line 1: kind: got 'maths'"),
        (
            [{"kind": "number", "prompt": "a", "answer": 1}, {"kind": "text", "prompt": "b"}],
            r"line 2: kind: got 'text', expected 'number'",
        ),
        ([{"kind": "number", "prompt": "a", "answer": "five"}], r"line 1: answer: got 'five'"),
        ([{"kind": "number", "prompt": "a", "answer": True}], r"line 1: answer: got True"),
        ([{"kind": "number", "prompt": "a"}], r"line 1: answer: got None, expected a number"),
        ([{"kind": "text", "prompt": "a", "answer": []}], r"answer: got \[\], expected a text"),
        ([{"kind": "text", "prompt": "a", "answer": 5}], r"answer: got 5, expected a text"),
        ([{"kind": "code", "prompt": "a", "answer": 5}], r"got 'answer', expected 'tests' alone"),
        ([{"kind": "code", "prompt": "a"}], r"tests: got None, expected Python statements"),
        ([{"kind": "code", "prompt": "a", "tests": "assert ("}], r"line 1: tests: not Python"),
        ([{"kind": "text", "prompt": "a", "anwser": "b"}], r"Did you mean 'answer'"),
        ([{"kind": "text", "answer": "b"}], r"line 1: got no prompt"),
        ([{"kind": "text", "prompt": "a", "answer": "b", "max_new_tokens": 0}], "max_new_tokens"),
    ],
)
def test_bad_lines_are_named(tmp_path, rows, message) -> None:
    with pytest.raises(ConfigError, match=message):
        read_tasks([task_file(tmp_path, "bad", *rows)])


def test_unknown_names(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"neither a file nor a task .* mean 'arithmetic'"):
        read_tasks(["aritmetic"])
    with pytest.raises(ConfigError, match="'code' twice"):
        read_tasks(["code", "code"])
