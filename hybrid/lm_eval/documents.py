"""The documents of the tasks that ship: the questions of `hybrid eval`, as lm-eval wants them.

The YAML files in tasks/ name these functions. They pass answers on as they are: lm-eval's templates
would turn the text "1212" into a number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset

from hybrid.eval.scorers import last_number, read_number
from hybrid.eval.task import Task, read_tasks

_NUM_CHOICES = 4


def arithmetic(**_: Any) -> dict[str, Dataset]:
    """Return questions and the number that is right."""
    return _test_split(
        [
            {"question": item.prompt["prompt"], "answer": str(item.expected)}
            for item in _task("arithmetic").items
        ]
    )


def score_number(document: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return 1 where the last number of the answer is the right one, as `hybrid eval` does."""
    is_right = last_number(results[0]) == read_number(document["answer"])
    return {"exact_match": float(is_right)}


def extraction(**_: Any) -> dict[str, Dataset]:
    """Return texts with a question, and four answers: its own and those of the next questions."""
    items = _task("extraction").items
    rows = []
    for index, item in enumerate(items):
        following = [items[(index + n) % len(items)] for n in range(_NUM_CHOICES)]
        choices = sorted(other.expected[0] for other in following)
        turns = [turn["content"] for turn in item.prompt["messages"]]
        rows.append(
            {
                "question": "\n".join(turns),
                "choices": choices,
                "answer": choices.index(item.expected[0]),
            }
        )
    return _test_split(rows)


def sentences(**_: Any) -> dict[str, Dataset]:
    """Return the sentences that `extraction` asks about, each once."""
    questions = [item.prompt["messages"][-1]["content"] for item in _task("extraction").items]
    texts = [question.partition("\n")[0].removeprefix("Text: ") for question in questions]
    return _test_split([{"text": text} for text in dict.fromkeys(texts)])


def _task(name: str) -> Task:
    return read_tasks([name])[0]


def _test_split(rows: list[dict[str, Any]]) -> dict[str, Dataset]:
    return {"test": Dataset.from_list(rows)}
