"""`hybrid eval` end to end: report, gate, exit codes, going on where a run was stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from answering import answering, task_file

from hybrid.cli import eval as command
from hybrid.models.tiny import tiny_checkpoint

ANSWERS = {"2 + 3?": "It is 5.", "2 + 2?": "It is 5.", "Who?": "Ann"}
WORSE = {**ANSWERS, "2 + 3?": "It is 9."}


@pytest.fixture
def tasks(tmp_path) -> tuple[str, ...]:
    sums = [{"kind": "number", "prompt": "2 + 3?", "answer": 5}, {"prompt": "2 + 2?", "answer": 4}]
    paths = [
        task_file(tmp_path, "sums", *sums),
        task_file(tmp_path, "names", {"kind": "text", "prompt": "Who?", "answer": "Ann"}),
    ]
    return tuple(word for path in paths for word in ("--tasks", path))


@pytest.fixture(autouse=True)
def committed(monkeypatch) -> None:
    """A checkout without local changes, whatever this one is like."""
    from hybrid.bench import environment
    from hybrid.revision import Revision

    monkeypatch.setattr(environment, "git_revision", lambda: Revision("abc", False))


def test_report_and_pictures(run, tasks, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    strategies = ("--strategy", "ar", "--strategy", "speculative block_size=3")
    code, stdout, stderr = run(
        "eval", *tasks, *strategies, "--out", str(out), decoder=answering(ANSWERS)
    )
    assert code == 0, stderr
    for part in ("sums", "names", "speculative block_size=3", "50.0%", "AUP", "report.md"):
        assert part in stdout
    assert "1/4 sums, ar: 50.0%" in stderr
    names = {path.name for path in out.iterdir()}
    assert names == {"cells.jsonl", "curves.png", "report.json", "report.md"}
    document = json.loads((out / "report.json").read_text())
    assert document["kind"] == "eval"
    assert document["settings"]["tasks"] == ["sums", "names"]
    assert (document["settings"]["dtype"], document["settings"]["seed"]) == ("float32", 0)
    assert document["environment"]["device"] == "cpu"
    found = [(r["task"], r["strategy"], r["parameters"], r["accuracy"]) for r in document["rows"]]
    assert found == [
        ("sums", "ar", {}, 0.5),
        ("names", "ar", {}, 1.0),
        ("sums", "speculative", {"block_size": 3}, 0.5),
        ("names", "speculative", {"block_size": 3}, 1.0),
    ]
    assert document["aup"][0]["aup"] == pytest.approx(50)  # TPF 1, half of them right
    assert "![curves.png](curves.png)" in (out / "report.md").read_text()


def test_json_alone_and_a_grid(run, tasks) -> None:
    flags = ("--json", "--strategy", "speculative", "--set", "threshold=0", "--limit", "1")
    code, stdout, _ = run(
        "eval", *tasks, *flags, "--grid", "block_size=2,3", decoder=answering(ANSWERS)
    )
    assert code == 0
    rows = json.loads(stdout)["rows"]
    assert [row["parameters"]["block_size"] for row in rows] == [2, 2, 3, 3]
    assert [row["num_items"] for row in rows] == [1] * 4


def test_a_run_goes_on_where_it_was_stopped(run, tasks, tmp_path, monkeypatch) -> None:
    args, decoder = ("eval", *tasks, "--out", str(tmp_path / "out")), answering(ANSWERS)

    def stop(row, done, total) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(command, "report_progress", stop)
        code, _, stderr = run(*args, decoder=decoder)
    cells = tmp_path / "out" / "cells.jsonl"
    assert code == 130
    assert "Finished cells are kept in" in stderr
    assert len(cells.read_text().splitlines()) == 3
    assert not (tmp_path / "out" / "report.json").exists()
    code, _, _ = run(*args, decoder=decoder)
    assert code == 0
    assert len(cells.read_text().splitlines()) == 4
    num_forwards = decoder.backbone.num_forwards
    assert run(*args, decoder=decoder)[0] == 0
    assert decoder.backbone.num_forwards == num_forwards
    assert run(*args, "--model", "another", decoder=decoder)[0] == 0
    assert len(cells.read_text().splitlines()) == 8


def test_the_gate(run, tasks, tmp_path) -> None:
    flags, old = (*tasks, "--strategy", "ar"), tmp_path / "a" / "report.json"
    assert run("eval", *flags, "--out", str(old.parent), decoder=answering(ANSWERS))[0] == 0
    gate = ("eval", *flags, "--compare", str(old))
    code, stdout, _ = run(*gate, decoder=answering(ANSWERS))
    assert code == 0
    assert "Nothing dropped by more than 0.01." in stdout
    code, stdout, _ = run(*gate, decoder=answering(WORSE))
    assert code == 1
    assert "Dropped by more than 0.01" in stdout
    assert run(*gate, "--max-drop", "0.5", decoder=answering(WORSE))[0] == 0
    code, stdout, _ = run(*gate, "--json", decoder=answering(WORSE))
    assert code == 1
    (drop,) = json.loads(stdout)["comparison"]["drops"]
    assert drop == {"task": "sums", "strategy": "ar", "number": "accuracy", "old": 0.5, "new": 0.0}


def test_two_reports_are_compared_without_a_model(run, tasks, tmp_path, monkeypatch) -> None:
    for name, answers in (("old", ANSWERS), ("new", WORSE)):
        args = ("eval", *tasks, "--strategy", "ar", "--out", str(tmp_path / name))
        assert run(*args, decoder=answering(answers))[0] == 0
    monkeypatch.setattr("hybrid.cli.options.load_decoder", None)
    old, new = (str(tmp_path / name / "report.json") for name in ("old", "new"))
    code, stdout, _ = run("eval", "--compare", old, "--against", new)
    assert code == 1
    assert "accuracy" in stdout
    assert run("eval", "--compare", new, "--against", old)[0] == 0
    code, stdout, _ = run("eval", "--compare", old, "--against", old, "--json")
    assert (code, json.loads(stdout)) == (0, {"comparison": {"max_drop": 0.01, "drops": []}})


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--against", "new.json"), 2, "--against needs --compare"),
        (("--limit", "0"), 2, "limit"),
        (("--compare", "none.json"), 1, "none.json cannot be read"),
        (("--tasks", "none"), 1, "neither a file nor a task"),
        (("--strategy", "speculativ"), 1, "Did you mean 'speculative'?"),
        (("--strategy", "llada"), 1, "Nothing was run. llada: "),
        (("--set", "block_size=4"), 1, "expected one --strategy"),
    ],
)
def test_errors(run, args, code, message) -> None:
    decoder = answering(ANSWERS)
    found, _, stderr = run("eval", *args, decoder=decoder)
    assert found == code
    assert message in " ".join(stderr.replace("│", " ").split())
    assert decoder.backbone.num_forwards == 0


def test_a_real_model_and_its_usual_strategies(run, tmp_path) -> None:
    model = str(tiny_checkpoint(tmp_path / "tiny"))
    args = ("--tasks", "arithmetic", "--limit", "2", "-n", "8", "--dtype", "float32", "--json")
    code, stdout, stderr = run("eval", "--model", model, *args)
    assert code == 0, stderr
    rows = json.loads(stdout)["rows"]
    assert [row["strategy"] for row in rows] == ["ar", "speculative"]
    assert rows[0]["counts"]["num_new_tokens"] == rows[1]["counts"]["num_new_tokens"]


def test_without_matplotlib_there_are_numbers_all_the_same(
    run, tasks, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("hybrid.pictures.is_available", lambda: False)
    out = tmp_path / "out"
    code, _, stderr = run("eval", *tasks, "--out", str(out), decoder=answering(ANSWERS))
    assert code == 0
    assert "hybrid-decoder[plot]" in stderr
    assert {path.name for path in out.iterdir()} == {"cells.jsonl", "report.json", "report.md"}
