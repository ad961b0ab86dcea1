"""`hybrid calibrate`: a table or JSON, pictures, and what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import random_prompts
from profiles import confident_decoder, made_up

from hybrid.calibration.calibrate import CalibrationConfig
from hybrid.cli import options
from hybrid.router.profile import Profile

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    prompts = random_prompts(*[5] * 150, vocab_size=16)
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"p": ids}) + "\n" for ids in prompts))
    return path


@pytest.fixture
def words(data: Path) -> list[str]:
    out = ["--output", str(data.with_name("profile.json"))]
    return ["calibrate", "--data", str(data), *out, "--risk", "0.1", "-n", "12"]


def test_a_table_of_the_thresholds_and_the_file(run: Run, words: list[str], tmp_path: Path) -> None:
    code, out, err = run(*words, "--domain", "noise", decoder=confident_decoder())
    assert code == 0
    profile = Profile.load(tmp_path / "profile.json")
    lines = out.splitlines()
    assert lines[0] == "risk 0.1 with confidence 95%, domain noise, temperature 0"
    assert [float(line.split()[0]) for line in lines[4:]] == [
        t.threshold for t in profile.thresholds
    ]
    assert err.splitlines()[0] == "fit ..."
    # The same command again prints the same, from the evidence.
    assert run(*words, "--domain", "noise", decoder=confident_decoder())[:2] == (0, out)


def test_json_is_the_profile_alone(run: Run, words: list[str], tmp_path: Path) -> None:
    code, out, _ = run(*words, "--json", decoder=confident_decoder())
    assert code == 0
    assert Profile(**json.loads(out)) == Profile.load(tmp_path / "profile.json")


def test_limit_takes_the_first_prompts(run: Run, words: list[str], tmp_path: Path) -> None:
    code, _, err = run(*words, "--limit", "3", decoder=confident_decoder())
    assert code == 1
    assert "prompts: got 3, expected hundreds" in err
    code, out, _ = run(*words, "--limit", "140", "--json", decoder=confident_decoder())
    assert code == 0
    num_tested = 140 - round(140 * CalibrationConfig().fit_share)
    assert json.loads(out)["thresholds"][0]["num_prompts"] == num_tested


def test_a_picture(run: Run, words: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "profile.png"
    assert run(*words, "--plot", str(path), decoder=confident_decoder())[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_is_refused_before_anything_is_decoded(
    run: Run, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    plot = str(tmp_path / "profile.png")
    code, out, err = run(*words, "--plot", plot, decoder=confident_decoder())
    assert (code, out) == (1, "")
    assert "pip install 'hybrid-decoder[plot]'" in err
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.jsonl"}


def test_check_measures_on_other_prompts(run: Run, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    made_up(confident_decoder(), 0.9, risk=0.2).save(path)
    words = ["calibrate", "--data", str(data), "--check", str(path), "--limit", "5", "-n", "8"]
    code, out, err = run(*words, decoder=confident_decoder())
    assert code == 0
    assert out.startswith("5 prompts x 8 tokens, profile: test, risk 0.2\n")
    assert err == "prompts ...\n"
    code, out, _ = run(*words, "--json", decoder=confident_decoder())
    rows = json.loads(out)["rows"]
    assert [row["strategy"] for row in rows] == [
        "ar", "speculative", "hybrid risk=0", "hybrid risk=0.2"
    ]  # fmt: skip
    assert [row["equal_to_ar"] for row in rows[:3]] == [5, 5, 5]
    assert {p.name for p in tmp_path.iterdir()} == {"profile.json", "prompts.jsonl"}


@pytest.mark.parametrize("both", [True, False])
def test_one_of_output_and_check(run: Run, data: Path, both: bool) -> None:
    given = ["--output", "a.json", "--check", str(data)] if both else []
    code, out, err = run("calibrate", "--data", str(data), *given, decoder=confident_decoder())
    assert (code, out) == (1, "")
    assert err == "Error: hybrid calibrate: expected --output or --check, one of them.\n"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--risk", "0"], "risk: got 0.0, expected greater than 0"),
        (["--risk", "1"], "risk: got 1.0, expected less than 1"),
        (["--delta", "2"], "delta: got 2.0, expected less than 1"),
        (["--block-size", "1"], "block_size: got 1, expected greater than or equal to 2"),
        (["--temperature", "-1"], "temperature: got -1.0"),
    ],
)
def test_bad_numbers_are_refused_before_a_model_is_loaded(
    run: Run, words: list[str], given: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "load_decoder", None)
    code, out, err = run(*words, *given)
    assert (code, out) == (1, "")
    assert message in err


def test_wrong_usage_and_files_that_are_not_there(run: Run, words: list[str], data: Path) -> None:
    assert run("calibrate", "--data", "missing.jsonl", "--output", "a")[0] == 2
    assert run(*words, "--limit", "0")[0] == 2
    assert run(*words, "--cost", "time")[0] == 2
    assert run("calibrate")[0] == 2
    data.write_text("{\n")
    code, _, err = run(*words, decoder=confident_decoder())
    assert code == 1
    assert "prompts.jsonl line 1: not JSON" in err


def test_what_cannot_be_promised_or_written_is_one_line(
    run: Run, words: list[str], data: Path, tmp_path: Path
) -> None:
    code, out, err = run(*words, "--limit", "20", decoder=confident_decoder(flattery=0.4))
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith("Error: No threshold keeps a risk of 0.1")
    words[words.index("--output") + 1] = str(data / "profile.json")
    code, out, err = run(*words, decoder=confident_decoder())
    assert (code, out) == (1, "")
    assert "cannot be" in err
    assert "Traceback" not in err


def test_a_profile_that_is_none(run: Run, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text('{"format": 1, "model": "\x1b[31m"}')
    for args in (
        ("calibrate", "--data", str(data), "--check", str(path)),
        ("generate", "hi", "--strategy", "hybrid", "--set", f"profile={path}", "--risk", "0.5"),
    ):
        code, out, err = run(*args, decoder=confident_decoder())
        assert (code, out) == (1, "")
        assert err.startswith("Error: ")
        assert "\x1b" not in err
        assert err.count("\n") == 1
