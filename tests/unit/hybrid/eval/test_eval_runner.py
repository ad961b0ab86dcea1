"""Cells measured on a decoder whose answers are known: scores, counts, reuse, refusals."""

from __future__ import annotations

import json

import pytest
from answering import answering, task_file

from hybrid.errors import ConfigError
from hybrid.eval.agreement import expecting, prompt_task
from hybrid.eval.cells import Cells
from hybrid.eval.grid import read_strategies
from hybrid.eval.runner import Evaluation
from hybrid.eval.task import read_tasks
from hybrid.strategy import Ar, Strategy

AR = Strategy.preset("ar")
ANSWERS = {"2 + 3?": "It is 5.", "2 + 2?": "It is 5.", "7?": "7"}


@pytest.fixture
def task(tmp_path):
    rows = [
        {"kind": "number", "prompt": question, "answer": number}
        for question, number in zip(ANSWERS, (5, 4, 7), strict=True)
    ]
    return read_tasks([task_file(tmp_path, "sums", *rows)])[0]


def test_a_cell_by_hand(task) -> None:
    cell = Evaluation(answering(ANSWERS), Cells(None, {})).cell(AR, task)
    row = cell.row
    assert (row["strategy"], row["parameters"], row["task"]) == ("ar", {}, "sums")
    assert (row["num_items"], row["num_right"], row["accuracy"]) == (3, 2, 2 / 3)
    tokens = [len(answer) + 1 for answer in ANSWERS.values()]  # bytes, and the end
    assert row["counts"]["num_new_tokens"] == sum(tokens)
    assert row["counts"]["num_forwards"] == sum(tokens)  # the prefill gives the first token
    assert row["counts"]["num_prefill_forwards"] == 3
    assert row["tokens_per_forward"] == row["total_tokens_per_forward"] == 1
    assert row["tokens_per_second"] == pytest.approx(sum(tokens) / row["seconds"])
    assert row["latency_ms"] > row["ttft_ms"] > 0
    assert json.loads(json.dumps(row)) == row
    scores = [(item["score"], item["text"], len(item["tokens"])) for item in cell.items]
    assert scores == [(1, "It is 5.", 9), (0, "It is 5.", 9), (1, "7", 2)]
    assert cell.items[1]["reason"] == "got 5, expected 4"
    assert cell.items[1]["question"] == "sums.jsonl line 2"


def test_strategies_times_tasks_and_nothing_twice(task, tmp_path) -> None:
    decoder, path = answering(ANSWERS), tmp_path / "cells.jsonl"
    strategies = read_strategies(["ar", "speculative block_size=4"])
    tasks, seen = [task, task.first(1)], []
    evaluation = Evaluation(decoder, Cells(path, {}))
    cells = evaluation.cells(strategies, tasks, lambda row, *place: seen.append((row, place)))
    assert [row["num_items"] for row, _ in seen] == [3, 1, 3, 1]
    assert [place for _, place in seen] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert [cell.row["parameters"] for cell in cells[2:]] == [{"block_size": 4}] * 2
    num_forwards = decoder.backbone.num_forwards
    again = Evaluation(decoder, Cells(path, {})).cells(strategies, tasks)
    assert again == cells
    assert decoder.backbone.num_forwards == num_forwards
    Evaluation(decoder, Cells(path, {})).cells(read_strategies(["ngram"]), tasks)
    assert decoder.backbone.num_forwards > num_forwards


def test_a_file_that_a_parameter_names_is_part_of_the_setting(task, tmp_path) -> None:
    class Profiled(Ar):
        """`ar`, with a file."""

        profile: str

    decoder, profile = answering(ANSWERS), tmp_path / "profile.json"
    strategy = Strategy("profiled", Profiled(profile=str(profile)))
    evaluation = Evaluation(decoder, Cells(None, {}))
    costs = []
    for content in ("1", None, "22"):
        if content is not None:
            profile.write_text(content)
        before = decoder.backbone.num_forwards
        evaluation.cell(strategy, task)
        costs.append(decoder.backbone.num_forwards - before)
    assert costs[1] == 0
    assert costs[2] == costs[0] > 0


def test_a_stopped_run_keeps_its_finished_cells(task, tmp_path) -> None:
    path, strategies = tmp_path / "cells.jsonl", read_strategies(["ar", "ngram"])

    def stop(row, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Evaluation(answering(ANSWERS), Cells(path, {})).cells(strategies, [task], stop)
    assert len(path.read_text().splitlines()) == 1
    Evaluation(answering(ANSWERS), Cells(path, {})).cells(strategies, [task])
    assert len(path.read_text().splitlines()) == 2


def test_what_cannot_run_is_refused_before_anything_does(task) -> None:
    decoder = answering(ANSWERS, max_seq_len=80)
    evaluation = Evaluation(decoder, Cells(None, {}))
    with pytest.raises(ConfigError) as error:
        evaluation.check(read_strategies(["llada", "ar", "sdar block_size=4"]), [task])
    message = str(error.value)
    assert message.startswith("Nothing was run. llada: ")
    assert "sdar block_size=4: " in message
    assert "ar: prompt: got" in message  # prompt and 64 tokens are more than 80
    assert decoder.backbone.num_forwards == 0
    short = [task.first(1)]
    roomy = Evaluation(answering(ANSWERS), Cells(None, {}))
    roomy.check([AR], short)


def test_agreement_with_ar(tmp_path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("2 + 3?\n7?\n")
    task = prompt_task(path, 20)
    assert (task.name, task.kind, [item.max_new_tokens for item in task.items]) == (
        "prompts",
        "tokens",
        [20, 20],
    )
    evaluation = Evaluation(answering(ANSWERS), Cells(None, {}))
    base = evaluation.cell(AR, task)
    assert base.row["accuracy"] == 1
    expected = expecting(task, base)
    assert [len(item.expected) for item in expected.items] == [9, 2]
    assert expected.digest != task.digest
    assert evaluation.cell(Strategy.preset("ngram"), expected).row["num_right"] == 2
    # Another model: 8 of 9 places agree, the other answer is equal.
    other = answering({**ANSWERS, "2 + 3?": "It is 6."})
    row = Evaluation(other, Cells(None, {})).cell(AR, expected).row
    assert row["accuracy"] == pytest.approx((8 / 9 + 1) / 2)
    assert row["num_right"] == 1


def test_the_prompts_of_bench_are_the_default() -> None:
    task = prompt_task(None)
    assert (len(task.items), task.items[0].max_new_tokens) == (20, 128)
