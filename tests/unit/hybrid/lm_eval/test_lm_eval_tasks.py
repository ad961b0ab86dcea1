"""The tasks that ship: what they ask, and the same numbers from lm-eval's own model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from hybrid.eval.task import read_tasks
from hybrid.lm_eval import TASKS, HybridLM
from hybrid.lm_eval.documents import arithmetic, extraction, score_number, sentences
from hybrid.models.tiny import tiny_checkpoint

NAMES = ["hybrid_arithmetic", "hybrid_extraction", "hybrid_sentences"]


def evaluate(lm: Any, **options: Any) -> dict[str, Any]:
    manager = TaskManager(include_path=TASKS, include_defaults=False)
    assert manager.all_tasks == NAMES
    found: dict[str, Any] = simple_evaluate(
        lm, tasks=NAMES, task_manager=manager, limit=4, bootstrap_iters=0, **options
    )
    return found


def _numbers(run: dict[str, Any], name: str) -> dict[str, float]:
    results = run["results"][name]
    return {metric: value for metric, value in results.items() if isinstance(value, float)}


@pytest.mark.parametrize("chat", [False, True], ids=["raw", "chat"])
def test_results_are_those_of_hf(chat: bool, tmp_path: Path) -> None:
    path = str(tiny_checkpoint(tmp_path))
    theirs = HFLM(path, dtype="float32", device="cpu", batch_size=4)
    wanted = evaluate(theirs, apply_chat_template=chat)
    got = evaluate(HybridLM(path, strategy="ngram", batch_size=4), apply_chat_template=chat)
    for name in NAMES:
        assert got["samples"][name]
        for mine, other in zip(got["samples"][name], wanted["samples"][name], strict=True):
            assert mine["arguments"] == other["arguments"]
        assert _numbers(got, name) == pytest.approx(_numbers(wanted, name), rel=1e-4)
    texts = [
        [sample["resps"] for sample in run["samples"]["hybrid_arithmetic"]] for run in (got, wanted)
    ]
    assert texts[0] == texts[1]
    assert got["config"]["hybrid_tokens_per_forward"] >= 1


def test_questions_are_those_of_hybrid_eval() -> None:
    (task,) = read_tasks(["arithmetic"])
    asked = [(row["question"], row["answer"]) for row in arithmetic(pretrained="x")["test"]]
    assert asked == [(item.prompt["prompt"], str(item.expected)) for item in task.items]


@pytest.mark.parametrize(
    ("answer", "text", "wanted"),
    [
        ("1212", "1212", 1.0),  # lm-eval's templates would have made a number of it
        ("1212", "It is 1,212.", 1.0),
        ("1212", "1212 or 1213", 0.0),
        ("0.5", "0.50", 1.0),
        ("12", "twelve", 0.0),
    ],
)
def test_the_last_number_counts(answer: str, text: str, wanted: float) -> None:
    assert score_number({"answer": answer}, [text]) == {"exact_match": wanted}


def test_each_text_has_four_answers_and_one_is_right() -> None:
    (task,) = read_tasks(["extraction"])
    rows = extraction()["test"]
    assert len(rows) == len(task.items)
    for row, item in zip(rows, task.items, strict=True):
        assert len(set(row["choices"])) == 4
        assert row["choices"][row["answer"]] in item.expected
        assert row["question"].endswith(item.prompt["messages"][-1]["content"])
    assert {row["answer"] for row in rows} == {0, 1, 2, 3}


def test_sentences_are_texts_without_their_questions() -> None:
    texts = sentences()["test"]["text"]
    assert texts[0] == "Maria works as a nurse in Lisbon."
    assert len(set(texts)) == len(texts) == 27
    assert not any("?" in text or text.startswith("Text:") for text in texts)
