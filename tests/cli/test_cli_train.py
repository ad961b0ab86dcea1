"""``hybrid train``: flags, files of fields, progress, Ctrl-C, errors."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid import pictures
from hybrid.cli import train
from hybrid.config import parse_setting
from hybrid.models.tiny import tiny_checkpoint
from hybrid.training import loop, plot
from hybrid.training.recipes import RECIPES, config_class
from hybrid.training.self_diffusion.config import SelfDiffusionConfig

Run = Callable[..., tuple[int, str, str]]

FIELDS = {
    "num_draft_tokens": 3, "entry_layer": 1, "feature_layers": "0,1", "rank": 2,
    "warmup_steps": 2, "anchors_per_sequence": 4, "num_eval_sequences": 2, "eval_every": 4,
}  # fmt: skip
SETTINGS = [word for name, value in FIELDS.items() for word in ("--set", f"{name}={value}")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return tiny_checkpoint(folder, vocab_size=32, num_layers=2, tokenizer=False)


@pytest.fixture
def words(model: Path, tmp_path: Path) -> list[str]:
    """The command with all it needs."""
    rows = [{"p": [i, 1], "r": [2, i, 4, 5, i, 6]} for i in range(8)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "train", "self-diffusion", "--data", str(data), "--output", str(tmp_path / "run"),
        "--model", str(model), "--steps", "6", *SETTINGS,
    ]  # fmt: skip


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[SelfDiffusionConfig]:
    """Configurations that would have been trained."""
    configs: list[SelfDiffusionConfig] = []
    monkeypatch.setattr(train, "_run", lambda name, config: configs.append(config))
    return configs


def test_trains_and_prints_the_folder(run: Run, words: list[str], tmp_path: Path) -> None:
    code, out, err = run(*words)
    assert code == 0
    assert out == f"{tmp_path / 'run' / 'adapter'}\n"
    names = {path.name for path in (tmp_path / "run" / "adapter").iterdir()}
    assert {"README.md", "adapter_model.safetensors", "draft_config.json"} <= names
    lines = [line for line in err.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["4/6", "6/6"], "plain lines, one per evaluation"
    assert re.fullmatch(r"step 4/6  loss \d\.\d{3}  E \d\.\d\d  0:00:0\d left", lines[0])
    assert "\x1b" not in err


def test_all_flags_reach_the_configuration(run: Run, seen: list[SelfDiffusionConfig]) -> None:
    code, _, err = run(
        "train", "self-diffusion", "--data", "d", "--output", "o", "-m", "org/name",
        "--steps", "7", "--seed", "3", "--learning-rate", "2e-4", "--set", "rank=4",
        "--set", "feature_layers=1,2", "--set", "keep_contexts=true", "--set", "decay=1.5",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert seen == [
        SelfDiffusionConfig(
            data="d", output="o", model="org/name", steps=7, seed=3, learning_rate=2e-4, rank=4,
            feature_layers=(1, 2), keep_contexts=True, decay=1.5,
        )
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("rank=4", 4),
        ("decay=0.5", 0.5),
        ("feature_layers=[1, 2]", [1, 2]),
        ("feature_layers=1,2", [1, 2]),
        ("keep_contexts=true", True),
        ("model=a=b", "a=b"),
        ("model=a,b", "a,b"),
        ("model=", ""),
    ],
)
def test_values_of_set(text: str, value: Any) -> None:
    parsed = parse_setting(text, "--set")
    assert parsed == (text.partition("=")[0], value)
    assert type(parsed[1]) is type(value) or value == ""


@pytest.mark.parametrize("suffix", [".json", ".yaml", ".yml"])
def test_config_file_then_set_then_flags(
    run: Run, seen: list[SelfDiffusionConfig], tmp_path: Path, suffix: str
) -> None:
    fields = {"data": "d", "output": "o", "rank": 4, "steps": 9, "seed": 1, "feature_layers": [3]}
    text = json.dumps(fields)
    if suffix != ".json":
        text = "\n".join(f"{name}: {value}" for name, value in fields.items())
    path = tmp_path / f"fields{suffix}"
    path.write_text(text)
    code, _, err = run(
        "train", "self-diffusion", "--config", str(path), "--set", "steps=8", "--set", "seed=2",
        "--seed", "5",
    )  # fmt: skip
    assert (code, err) == (0, "")
    (config,) = seen
    assert (config.rank, config.steps, config.seed, config.feature_layers) == (4, 8, 5, (3,))


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (["--output", "o"], "data: got nothing, expected a path. Give --data PATH"),
        (["--data", "d"], "output: got nothing"),
        (["--set", "rnk=4"], "has no parameter 'rnk'. Did you mean 'rank'?"),
        (["--set", "rank"], "--set: got 'rank', expected KEY=VALUE"),
        (["--set", "=3"], "--set: got '=3'"),
        (["--set", "rank=0"], "rank: got 0, expected"),
        (["--set", "rank=two"], "rank: got 'two', expected a valid integer"),
        (["--steps", "0"], "steps: got 0"),
        (["--learning-rate", "nan"], "learning_rate: got nan"),
        (["--seed", "-1"], "seed: got -1"),
        (["--config", "none.json"], "--config: none.json cannot be read"),
        ([], "data: none.jsonl cannot be read: No such file"),
    ],
)
def test_bad_input_is_one_line(
    run: Run, args: list[str], match: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    if args[:1] not in (["--output"], ["--data"]):
        args = ["--data", "none.jsonl", "--output", "o", *args]
    code, out, err = run("train", "self-diffusion", *args)
    assert code == 1
    assert out == ""
    assert err.startswith("Error: ")
    assert match in err
    assert err.count("\n") == 1
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("text", ["[1, 2]", "rank: [", "", "\t:"])
def test_bad_config_file(run: Run, tmp_path: Path, text: str) -> None:
    path = tmp_path / "fields.yaml"
    path.write_text(text)
    code, _, err = run("train", "self-diffusion", "--config", str(path))
    assert code == 1
    assert f"--config: {path}" in err


def test_wrong_usage_is_2(run: Run) -> None:
    assert run("train", "self-diffusion", "--steps", "many")[0] == 2
    code, out, err = run("train", "self-difusion")
    assert (code, out) == (2, "")
    assert "Unknown recipe 'self-difusion'. Did you mean 'self-diffusion'?" in err


def test_help_lists_the_recipes(run: Run) -> None:
    code, out, _ = run("train", "--help")
    assert code == 0
    words = " ".join(re.sub(r"[^\w.]", " ", out).split())
    for name, entry in RECIPES.items():
        about = re.sub(r"[^\w.]", " ", f"{name} {entry.about}")
        assert " ".join(about.split()) in words


@pytest.mark.parametrize("recipe", RECIPES)
def test_help_of_a_recipe_shows_an_example_and_all_fields(
    run: Run, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    code, out, _ = run("train", recipe, "--help")
    assert code == 0
    assert f"hybrid train {recipe} --data" in out
    for name, info in config_class(recipe).model_fields.items():
        value = "" if info.is_required() else "=" + re.escape(train._shown(info.get_default()))
        explained = re.search(rf"^ {name}{value}: \S", out, re.MULTILINE)
        assert explained, f"{name} is explained"


def test_help_does_not_import_torch() -> None:
    code = "import sys, hybrid.cli.main; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_says_once_that_there_is_no_plot(
    run: Run, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for can in (False, True):
        monkeypatch.setattr(pictures, "is_available", lambda can=can: can)
        monkeypatch.setattr(plot, "plot_metrics", lambda folder: None)
        code, out, err = run(*words)
        assert (code, out) == (0, f"{tmp_path / 'run' / 'adapter'}\n")
        assert err.count("No plot without matplotlib") == (not can)


def test_the_other_processes_are_silent(
    run: Run, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Any] = []
    monkeypatch.setattr(loop, "this_process", lambda: SimpleNamespace(is_main_process=False))
    monkeypatch.setattr(loop, "train", trained.append)
    assert run(*words) == (0, "", "")
    assert [recipe.config.steps for recipe in trained] == [6]


def test_another_configuration_in_the_folder(run: Run, words: list[str]) -> None:
    assert run(*words)[0] == 0
    code, _, err = run(*words, "--set", "rank=3")
    assert code == 1
    assert "holds a run with another rank (2, now 3)" in err


def interrupt_at(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """Press Ctrl-C during each of `steps`, once per mention."""
    real = loop._train_step

    def step(current: Any) -> dict[str, Any]:
        row = real(current)
        for _ in range(steps.count(current.step + 1)):
            signal.raise_signal(signal.SIGINT)
        return row

    monkeypatch.setattr(loop, "_train_step", step)


def test_ctrl_c_saves_the_step_and_says_how_to_go_on(
    run: Run, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = signal.getsignal(signal.SIGINT)
    interrupt_at(monkeypatch, 3)
    code, out, err = run(*words)
    assert code == 130
    assert out == ""
    assert "Stopped after step 3 of 6. The same command goes on from the last checkpoint" in err
    assert torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["step"] == 3
    assert signal.getsignal(signal.SIGINT) is handler
    monkeypatch.undo()
    assert run(*words)[0] == 0
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3, 4, 5, 6]


def test_a_second_ctrl_c_does_not_wait(
    run: Run, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at(monkeypatch, 5, 5)
    code, _, err = run(*words)
    assert code == 130
    assert "Stopped after step 4 of 6" in err
    assert torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["step"] == 4


def test_a_live_line_on_a_terminal(
    run: Run, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    monkeypatch.setenv("COLUMNS", "100")
    code, _, err = run(*words)
    assert code == 0
    assert "\x1b" in err
    assert re.search(r"step 6/6  loss \d\.\d{3}  E \d\.\d\d", err)
