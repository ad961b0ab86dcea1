"""`hybrid sweep` end to end: points, front, choice, refusals before anything runs."""

from __future__ import annotations

import json

import pytest
from answering import answering, task_file

ANSWERS = {"2 + 3?": "It is 5.", "2 + 2?": "It is 5.", "7?": "7"}
GRID = ("sweep", "--strategy", "speculative", "--grid", "block_size=2,4")


@pytest.fixture
def task(tmp_path) -> tuple[str, str]:
    rows = [{"kind": "number", "prompt": "2 + 3?", "answer": 5}, {"prompt": "2 + 2?", "answer": 4}]
    return "--tasks", task_file(tmp_path, "sums", *rows)


def test_points_and_the_flags_of_the_chosen_one(run, task, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    code, stdout, stderr = run(*GRID, *task, "--out", str(out), decoder=answering(ANSWERS))
    assert code == 0, stderr
    document = json.loads((out / "sweep.json").read_text())
    assert {path.name for path in out.iterdir()} == {"cells.jsonl", "front.png", "sweep.json"}
    points = document["points"]
    assert [point["parameters"] for point in points] == [{"block_size": 2}, {"block_size": 4}]
    assert [point["quality"] for point in points] == [0.5, 0.5]
    fastest = max(points, key=lambda point: point["tokens_per_second"])
    assert document["chosen"] == fastest
    assert [point["is_on_front"] for point in points] == [point is fastest for point in points]
    assert document["baseline"] is None
    size = fastest["parameters"]["block_size"]
    assert stdout.splitlines()[-1] == f"--strategy speculative --set block_size={size}"
    assert "chosen" in stdout


def test_agreement_with_ar(run, tmp_path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(ANSWERS))
    flags = ("--quality", "agreement", "--prompts", str(prompts), "-n", "12", "--limit", "2")
    code, stdout, stderr = run(*GRID, *flags, "--json", decoder=answering(ANSWERS))
    assert code == 0, stderr
    document = json.loads(stdout)
    assert (document["settings"]["quality"], document["settings"]["tasks"]) == (
        "agreement",
        ["prompts"],
    )
    # What is verified is what `ar` writes.
    assert [(p["quality"], p["num_right"]) for p in document["points"]] == [(1.0, 2), (1.0, 2)]
    assert document["baseline"]["strategy"] == "ar"


def test_refused_values_stop_it_before_anything_runs(run, task) -> None:
    decoder = answering(ANSWERS)
    flags = ("sweep", "--strategy", "speculative", "--grid", "block_size=4,0")
    code, _, stderr = run(*flags, *task, decoder=decoder)
    assert code == 1
    assert "block_size: got 0" in stderr
    code, _, stderr = run(
        "sweep", "--strategy", "llada", "--grid", "steps=4,8", *task, decoder=decoder
    )
    assert code == 1
    assert "llada steps=4: " in stderr
    assert "llada steps=8: " in stderr
    assert decoder.backbone.num_forwards == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("sweep", "--strategy", "ar"), "A sweep needs --strategy PRESET and --grid"),
        (("sweep", "--grid", "block_size=2"), "A sweep needs --strategy PRESET and --grid"),
        ((*GRID, "--quality", "speed"), "expected accuracy or agreement"),
        ((*GRID, "--prompts", "x"), "--prompts is for --quality agreement"),
        ((*GRID, "--quality", "agreement", "--tasks", "code"), "--tasks is for --quality accuracy"),
    ],
)
def test_wrong_usage(run, args, message) -> None:
    code, _, stderr = run(*args, decoder=answering(ANSWERS))
    assert code == 2
    assert message in " ".join(stderr.replace("│", " ").split())
