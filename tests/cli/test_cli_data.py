"""``hybrid data``: files in, files out, progress, Ctrl-C, errors."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import BYTES, EOS, FakeTarget, RandomTarget

from hybrid import HybridDecoder
from hybrid.models.tiny import tiny_checkpoint

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("tiny"), num_layers=2))


@pytest.fixture
def decoder() -> HybridDecoder:
    return HybridDecoder(RandomTarget(BYTES.vocab_size, eos_token_ids=(EOS,)), BYTES)


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    path = tmp_path / "asked.jsonl"
    rows = [{"prompt": f"question {n}?", "category": ("even", "odd")[n % 2]} for n in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_from_prompts_to_a_report(run: Run, model: str, asked: Path, tmp_path: Path) -> None:
    out = tmp_path / "data.jsonl"
    words = ("data", "generate", str(asked), "-o", str(out), "-m", model, "-n", "5", "--limit", "9")
    code, stdout, stderr = run(*words)
    assert (code, stdout) == (0, f"{out}\n"), stderr
    assert [row["prompt"] for row in lines(out)] == [f"question {n}?" for n in range(9)]

    code, stdout, _ = run("data", "inspect", str(out))
    assert code == 0
    facts = dict(re.findall(r"^ ?([a-z0-9.% EOS]+?)  +(\S.*?) *$", stdout, re.MULTILINE))
    assert (facts["examples"], facts["response tokens"]) == ("9", "45")
    assert (facts["ended by EOS"], facts["categories"]) == ("0.0%", "even 5, odd 4")
    assert "<|im_start|>user\nquestion 0?<|im_end|>\n" in stdout, "its own model decodes it"
    assert "sample 2" in stdout

    code, stdout, _ = run("data", "inspect", str(out), "--json", "--show", "1")
    report = json.loads(stdout)
    assert (code, report["num_examples"], report["num_bad"]) == (0, 9, 0)
    assert report["response_lengths"]["50"] == 5
    assert len(report["samples"]) == 1


def test_lines_of_progress_and_a_second_run(
    run: Run, decoder: HybridDecoder, asked: Path, tmp_path: Path
) -> None:
    words = ["data", "generate", str(asked), "-o", str(tmp_path / "d"), "-n", "4"]
    code, stdout, stderr = run(*words, "--limit", "10", "--json", decoder=decoder)
    done = json.loads(stdout)
    assert (code, done["num_prompts"], done["num_answers"]) == (0, 10, 10)
    assert done["num_tokens"] == sum(len(row["r"]) for row in lines(tmp_path / "d"))
    assert re.fullmatch(r"10/10 answers  \d+ tokens/s  0:00:00 left", stderr.splitlines()[-1])

    code, stdout, stderr = run(*words, decoder=decoder)
    shown = [line.split()[0] for line in stderr.splitlines()]
    assert shown == ["10/40", *(f"{n}/40" for n in range(12, 41, 2))], "twentieths"
    assert "\x1b" not in stderr
    assert run(*words, decoder=decoder) == (0, stdout, ""), "nothing left to do"


def test_a_live_line_on_a_terminal(
    run: Run, decoder: HybridDecoder, asked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    monkeypatch.setenv("COLUMNS", "100")
    words = ("data", "generate", str(asked), "-o", str(tmp_path / "d"), "-n", "4")
    code, _, stderr = run(*words, decoder=decoder)
    assert code == 0
    assert "\x1b" in stderr
    assert re.search(r"40/40 answers  \d+ tokens/s  0:00:00 left", stderr)


def test_prompts_from_stdin(
    run: Run, decoder: HybridDecoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin = SimpleNamespace(buffer=io.BytesIO("Où?\nWhy?\n".encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    code, _, stderr = run("data", "generate", "-", "-o", str(tmp_path / "d"), decoder=decoder)
    assert code == 0, stderr
    assert [row["prompt"] for row in lines(tmp_path / "d")] == ["Où?", "Why?"]


def test_ctrl_c_says_what_is_kept(run: Run, asked: Path, tmp_path: Path) -> None:
    def target(**fields: Any) -> HybridDecoder:
        return HybridDecoder(RandomTarget(BYTES.vocab_size, **fields), BYTES)

    out = tmp_path / "d"
    words = ("data", "generate", str(asked), "-o", str(out), "-n", "4", "--batch", "2")
    code, stdout, stderr = run(*words, decoder=target(fail_at={23: KeyboardInterrupt()}))
    kept = len(lines(out))
    assert (code, stdout, kept > 2) == (130, "", True)
    assert f"Stopped after {kept} answers, kept in {out}." in stderr
    assert run(*words, decoder=target())[0] == 0
    assert len(lines(out)) == 40


def test_prompts_that_the_model_wrote(run: Run, tmp_path: Path) -> None:
    letters = BYTES.encode("abcd")

    def law(tokens: list[int]) -> list[float]:
        return [5.0 * (t in letters) + 4.0 * (t == EOS) for t in range(BYTES.vocab_size)]

    decoder = HybridDecoder(FakeTarget(law, BYTES.vocab_size, eos_token_ids=(EOS,)), BYTES)
    out = tmp_path / "p.jsonl"
    words = ["data", "prompts", "-o", str(out), "--number", "5", "--start", "Write "]
    code, stdout, _ = run(*words, decoder=decoder)
    assert (code, stdout) == (0, f"{out}\n")
    assert len(lines(out)) == 5
    assert all(row["prompt"].startswith("Write ") for row in lines(out))
    data = str(tmp_path / "d")
    code, _, stderr = run("data", "generate", str(out), "-o", data, "-n", "4", decoder=decoder)
    assert code == 0, stderr

    out.unlink()
    code, _, stderr = run(*words, "--max-new-tokens", "9", "--top-p", "0.01", decoder=decoder)
    assert code == 1
    assert "ended none of 100 user turns" in stderr, "the same letter for ever"


def test_fewer_prompts_than_asked_for(run: Run, tmp_path: Path) -> None:
    said = [*BYTES.encode("what now?"), EOS]

    def law(tokens: list[int]) -> list[float]:
        at = len(tokens) - len(BYTES.encode("<|im_start|>user\n"))
        return [9e9 * (t == said[max(at, 0)]) for t in range(BYTES.vocab_size)]

    decoder = HybridDecoder(FakeTarget(law, BYTES.vocab_size, eos_token_ids=(EOS,)), BYTES)
    words = ("data", "prompts", "-o", str(tmp_path / "p"), "--number", "2", "--json")
    code, stdout, stderr = run(*words, decoder=decoder)
    assert (code, json.loads(stdout)["num_prompts"]) == (0, 1)
    assert "Only 1 of 2 prompts in 40 turns: the others did not end" in stderr


def test_prompts_without_an_answer_are_told(run: Run, asked: Path, tmp_path: Path) -> None:
    def law(tokens: list[int]) -> list[float]:
        return [9.0 * (t == EOS) for t in range(BYTES.vocab_size)]

    decoder = HybridDecoder(FakeTarget(law, BYTES.vocab_size, eos_token_ids=(EOS,)), BYTES)
    words = ("data", "generate", str(asked), "-o", str(tmp_path / "d"), "--limit", "3")
    code, _, stderr = run(*words, decoder=decoder)
    assert code == 0
    assert "3 prompts got no answer and have no line." in stderr
    assert (tmp_path / "d").read_bytes() == b""


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["generate", "none.jsonl", "-o", "d"], "none.jsonl cannot be read: No such file"),
        (["generate", "empty.txt", "-o", "d"], "prompts: empty.txt is empty"),
        (["generate", "bad.jsonl", "-o", "d"], "bad.jsonl line 2: not JSON"),
        (["generate", "ok.txt", "-o", "d", "--batch", "0"], "batch: got 0"),
        (["generate", "ok.txt", "-o", "bad.jsonl"], "this command did not write them"),
        (["prompts", "-o", "ok.txt", "--number", "3"], "output: ok.txt exists"),
        (["prompts", "-o", "d", "--number", "3", "-t", "0"], "temperature: got 0"),
        (["inspect", "none.jsonl"], "none.jsonl cannot be read"),
        (["inspect", "bad.jsonl", "--model", "no-such"], "Model 'no-such' not found"),
    ],
)
def test_bad_input_is_one_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], match: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("ok.txt").write_text("Why?\n")
    Path("bad.jsonl").write_text('{"prompt": "a"}\n{"prompt\n')
    code, stdout, stderr = run("data", *words)
    assert (code, stdout, stderr.count("\n")) == (1, "", 1)
    assert stderr.startswith("Error: ")
    assert match in stderr
    assert not Path("d").exists()


def test_inspect_fails_on_a_bad_line_and_prints_no_control_characters(
    run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"p": [1], "r": [2, 3], "category": "a\\u001b[31m [bold]"}\n{"p": [1]}\n')
    code, stdout, _ = run("data", "inspect", str(path))
    assert code == 1
    assert "d.jsonl line 2: expected an object with ids" in " ".join(stdout.split())
    assert "\x1b" not in stdout
    assert "[bold]" in stdout
    assert re.search(r"ended by EOS +unknown", stdout)


def test_help_shows_the_commands_and_examples(run: Run) -> None:
    code, stdout, _ = run("data", "--help")
    assert code == 0
    assert all(name in stdout for name in ("generate", "prompts", "inspect"))
    assert "--output data.jsonl" in run("data", "generate", "--help")[1]
    assert run("data", "generate", "x.jsonl")[0] == 2, "no output"
