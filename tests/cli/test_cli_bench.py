"""`hybrid bench` end to end on a tiny model: tables, the JSON document, the file, the errors."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from profiles import made_up

from hybrid import HybridDecoder
from hybrid.cli.bench_tables import print_tables
from hybrid.models.tiny import tiny_checkpoint

LLADA = str(Path(__file__).parents[1] / "golden" / "llada-fit")
QUICK = ("--max-new-tokens", "6", "--limit", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def keep_threads() -> Any:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_exact_logits_take_their_turn_too(run, model) -> None:
    args = ("--dtype", "float32", "--also-exact", "--no-transformers", "--strategies", "ar")
    code, stdout, stderr = run("bench", "--model", model, *QUICK, *args)
    assert code == 0, stderr
    rows = json.loads(stdout.splitlines()[-1])["rows"]
    assert [row["name"] for row in rows] == ["float32 ar", "float32 exact ar"]
    assert [row["dtype"] for row in rows] == ["float32", "float32 exact"]


def test_tables_then_one_json_document(run, model, tmp_path, keep_threads) -> None:
    out = tmp_path / "results" / "cpu.jsonl"
    args = ("bench", "--model", model, *QUICK, "--dtype", "float32", "--also-dtype", "bfloat16")
    code, stdout, stderr = run(*args, "--threads", "1", "--out", str(out))
    assert code == 0, stderr
    lines = stdout.splitlines()
    document = json.loads(lines[-1])
    assert out.read_text().splitlines() == [lines[-1]]
    table = "\n".join(lines[:-1])
    for heading in ("transformers", "× own ar", "draft/verify"):
        assert heading in table
    assert "Equal in float32: the tokens of transformers float32." in table
    assert "By category" not in table
    assert "prompt 2/2" in stderr

    settings = document["settings"]
    assert document["kind"] == "generate"
    assert (settings["num_prompts"], settings["max_new_tokens"]) == (2, 6)
    assert (settings["model"], settings["seed"], settings["temperature"]) == (model, 0, 0)
    assert len(settings["num_prompt_tokens"]) == 2
    env = document["environment"]
    names = {"hybrid", "python", "torch", "transformers", "git_sha", "is_dirty", "date", "device"}
    assert names | {"cpu", "threads", "peak_memory_mib"} <= set(env)
    assert (env["device"], env["threads"]) == ("cpu", 1)

    rows = {row["name"]: row for row in document["rows"]}
    strategies = ("ar", "ngram", "speculative")
    expected = [f"{dtype} {name}" for dtype in ("float32", "bfloat16") for name in strategies]
    assert list(rows) == ["transformers float32", *expected]
    for name in expected:
        row = rows[name]
        assert row["ratios"]["transformers float32"] > 0
        assert row["ratios"]["ar"] > 0
        assert len(row["seconds"]) == len(row["num_tokens"]) == 2
        assert set(row["tokens_per_second"]) == {"p20", "p50", "p80"}
        assert set(row["forwards"]) == {"prefill", "draft", "verify", "denoise"}
        assert row["verifier"] == "greedy"
    assert [rows[n]["greedy_match"] for n in expected[:3]] == [True, True, True]
    assert [rows[n]["reference"] for n in expected[3:]] == [None, "bfloat16 ar", "bfloat16 ar"]
    assert [rows[n]["drafter"] for n in expected[:3]] == ["none", "ngram", "ngram"]


def test_json_alone_without_transformers(run, model, tmp_path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"p": [5, 6, 7]}\n{"prompt": "hello"}\n')
    args = ("bench", "--model", model, "--json", "--no-transformers", "-n", "4")
    options = ("--strategies", "hybrid,ngram,hybrid", "--num-draft-tokens", "2")
    code, stdout, _ = run(*args, *options, "--prompts", str(prompts))
    assert code == 0
    document = json.loads(stdout)
    assert [row["strategy"] for row in document["rows"]] == ["hybrid", "ngram"]
    assert all(row["ratios"] == {} and row["reference"] is None for row in document["rows"])
    assert document["settings"]["num_prompt_tokens"][0] == 3
    assert document["settings"]["prompts"] == "prompts.jsonl"
    assert all(row["num_draft_tokens"] <= 2 for row in document["rows"])


def test_a_profile_is_named_by_its_path(run, model, tmp_path) -> None:
    path = tmp_path / "profile.json"
    made_up(HybridDecoder.from_pretrained(model), 0.9).save(path)
    given = ("--strategies", "hybrid", "--set", f"profile={path}", "--set", "modes=ar,speculative")
    code, out, _ = run("bench", "--model", model, "--no-transformers", "--json", *QUICK, *given)
    assert code == 0
    (row,) = json.loads(out)["rows"]
    assert row["parameters"] == {"profile": str(path), "modes": ["ar", "speculative"]}


def test_categories_are_reported(run, model, tmp_path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = ['{"prompt": "a", "category": "chat"}', '{"prompt": "b", "category": "code"}']
    prompts.write_text("\n".join([*lines, lines[0]]))
    args = ("bench", "--model", model, "--no-transformers", "-n", "4", "--prompts", str(prompts))
    code, stdout, _ = run(*args, "--strategies", "ar,ngram")
    assert code == 0
    *lines, last = stdout.splitlines()
    document = json.loads(last)
    assert document["settings"]["categories"] == ["chat", "code", "chat"]
    found = document["rows"][1]["by_category"]
    assert {name: own["num_prompts"] for name, own in found.items()} == {"chat": 2, "code": 1}
    assert sum(own["num_greedy_match"] for own in found.values()) == 3
    (row,) = (line.split() for line in lines if line.startswith("code "))
    assert (row[:2], row[2:4], row[-1]) == (["code", "float32"], ["ngram", "1"], "1/1")


def long_document() -> dict[str, Any]:
    """What twenty widths, a long name and a difference make."""
    row = {
        "name": "float32 " + "x" * 30, "engine": "hybrid", "dtype": "float32", "reference": "ar",
        "strategy": "ngram", "drafter": "ngram", "num_draft_tokens": 20, "seconds": [1.0],
        "num_tokens": [3], "ratios": {"transformers float32": 1.0, "ar": 1.0},
        "tokens_per_second": {"p50": 7.0}, "num_greedy_match": 0, "acceptance_length": 1.5,
        "acceptance_histogram": [1] * 21, "tokens_per_forward": 1.5, "loop_overhead": 0.01,
        "forwards": {"prefill": 1, "draft": 0, "verify": 2}, "planned_memory_mib": 10.0,
        "ms_per_forward": {str(width): float(width) for width in range(1, 22)},
        "largest_margin": 0.5, "first_divergence": {
            "prompt": 0, "position": 1, "expected": 2, "got": 3, "margin": 0.25,
        },
    }  # fmt: skip
    environment = {"gpu": None, "cpu": "CPU", "threads": 1, "torch": "2", "transformers": "5"}
    environment["peak_memory_mib"] = 9.0
    return {"kind": "generate", "rows": [row], "environment": environment}


def printed(capsys, monkeypatch, width: int | None) -> list[str]:
    """The lines that the tables of `long_document` take on a terminal, or in a pipe."""
    from rich import console

    if width is not None:
        terminal = functools.partial(
            console.Console, width=width, force_terminal=True, color_system=None
        )
        monkeypatch.setattr(console, "Console", terminal)
    print_tables(long_document())
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("width", [30, 59, 80, 200])
def test_tables_fit_the_terminal(capsys, monkeypatch, width) -> None:
    lines = printed(capsys, monkeypatch, width)
    sentences = ("Equal in", "float32 " + "x" * 30 + " leaves", "CPU,")  # the terminal wraps them
    tables = [line for line in lines if not line.startswith(sentences)]
    assert max(map(len, tables)) <= width
    assert "…" not in "".join(tables)
    words = " ".join(tables).split()
    assert {"1.0", "21.0", "95%", "5%", "0/1", "0/2", "ngram"} <= set(words)


def test_a_pipe_gets_a_line_per_row(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    lines = printed(capsys, monkeypatch, None)
    (times,) = (line for line in lines if "21.0" in line)
    assert times.split()[1:] == ["x" * 30, *(f"{width:.1f}" for width in range(1, 22))]
    assert sum("leaves ar first in prompt 0" in line and "0.5" in line for line in lines) == 1


def test_report_fills_a_page(run, tmp_path) -> None:
    document = long_document()
    document["settings"] = dict.fromkeys(("num_prompts", "max_new_tokens", "batch", "prompts"), 1)
    document["environment"] |= {"git_sha": None, "is_dirty": None, "date": "2026-11-29T18:44:27"}
    (tmp_path / "x.jsonl").write_text(json.dumps(document))
    page = tmp_path / "page.md"
    page.write_text("Über\n<!-- bench:begin x.jsonl -->\n<!-- bench:end -->\n", encoding="utf-8")
    assert run("bench", "report", str(page)) == (0, "", "")
    text = page.read_text(encoding="utf-8")
    assert text.startswith("Über\n<!-- bench:begin x.jsonl -->\n\n`x.jsonl` line 1, 2026-11-29")
    assert "| 95% |" in text
    code, _, stderr = run("bench", "report", str(tmp_path / "none.md"))
    assert code == 1
    assert "none.md cannot be read" in stderr


def test_a_difference_is_printed(run, model, monkeypatch) -> None:
    from hybrid.bench.candidates import Answer, DecoderCandidate

    true = DecoderCandidate.generate

    def generate(self: Any, prompt: Any, max_new_tokens: int) -> Answer:
        answer = true(self, prompt, max_new_tokens)
        if self.strategy != "ngram":
            return answer
        wrong = (answer.tokens[0] + 1) % 64
        return Answer((wrong, *answer.tokens[1:]), answer.records, answer.stats)

    monkeypatch.setattr(DecoderCandidate, "generate", generate)
    code, stdout, _ = run("bench", "--model", model, *QUICK, "--no-transformers")
    assert code == 0
    assert " 0/2" in stdout
    assert "float32 ngram leaves float32 ar first in prompt 0 at token 0" in stdout


def test_widths(run, model) -> None:
    code, stdout, _ = run("bench", "--model", model, "--widths", "1,4", "--also-dtype", "bfloat16")
    assert code == 0
    document = json.loads(stdout.splitlines()[-1])
    assert document["kind"] == "widths"
    assert {k: set(v) for k, v in document["ms_per_forward"].items()} == {
        "float32": {"1", "4"},
        "bfloat16": {"1", "4"},
    }
    assert "Milliseconds per forward" in stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--strategies", "specultive"), "Did you mean 'speculative'?"),
        (("--widths", "1,x"), "expected numbers such as 1,2,4,8."),
        (("--widths", "1,9999"), "expected at most 512 together"),
        (("--dtype", "float32", "--also-dtype", "float32"), "which --dtype measures already"),
        (("--max-new-tokens", "600", "--limit", "1", "--no-transformers"), "expected at most 512"),
        (("--prompts", "none.jsonl"), "none.jsonl cannot be read"),
        (("--llama-cpp", "python3", "--no-transformers"), "llama.cpp reads GGUF files"),
    ],
)
def test_errors_say_what_to_do(run, model, args, message) -> None:
    code, stdout, stderr = run("bench", "--model", model, *args)
    assert (code, stdout) == (1, "")
    assert message in stderr
    assert "Traceback" not in stderr


def test_a_result_is_not_lost_to_a_file_that_cannot_be_written(run, model, tmp_path) -> None:
    (tmp_path / "file").touch()
    out = str(tmp_path / "file" / "x.jsonl")
    args = ("bench", "--model", model, *QUICK, "--no-transformers", "--strategies", "ar")
    code, stdout, stderr = run(*args, "--json", "--out", out)
    assert code == 0
    assert json.loads(stdout)["rows"]
    assert "cannot be written" in stderr


# Diffusion models, and strategies with parameters


@pytest.fixture
def prompts(tmp_path) -> str:
    path = tmp_path / "ids.jsonl"
    path.write_text('{"p": [5, 6, 7]}\n{"p": [9, 8, 7, 6]}\n')
    return str(path)


def test_a_model_that_cannot_verify_is_measured_at_what_it_is_meant_for(run, prompts) -> None:
    args = ("bench", "--model", LLADA, "--dtype", "float32", "-n", "8", "--prompts", prompts)
    code, stdout, stderr = run(*args)
    assert code == 0, stderr
    *lines, last = stdout.splitlines()
    (row,) = json.loads(last)["rows"]  # transformers has no such model
    assert (row["strategy"], row["parameters"], row["drafter"]) == ("llada", {}, None)
    assert row["forwards"] == {"prefill": 0, "draft": 0, "verify": 0, "denoise": 16}
    assert row["tokens_per_forward"] == 1
    assert row["ms_per_forward"].keys() == {"11", "12"}
    (cells,) = (line.split() for line in lines if line.endswith("16"))
    assert cells == ["float32", "llada", "-", "-", "-", "1.00", "0/0", "16"]


def test_parameters_go_to_the_one_strategy_that_is_named(run, prompts) -> None:
    args = ("bench", "--model", LLADA, "--json", "-n", "8", "--prompts", prompts)
    code, stdout, _ = run(
        *args, "--strategies", "llada", "--set", "steps=2", "--set", "block_size=4"
    )
    assert code == 0
    (row,) = json.loads(stdout)["rows"]
    assert row["parameters"] == {"steps": 2, "block_size": 4}
    assert row["forwards"]["denoise"] == 4
    assert row["tokens_per_forward"] == 4
    code, stdout, _ = run(*args, "--strategies", "llada,fast-dllm")
    assert [row["strategy"] for row in json.loads(stdout)["rows"]] == ["llada", "fast-dllm"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--set", "steps=2"), "--set: got parameters for 0 strategies, expected one"),
        (("--strategies", "llada,dream", "--set", "steps=2"), "for 2 strategies, expected one"),
        (("--strategies", "llada", "--set", "step=2"), "Did you mean 'steps'?"),
        (("--strategies", "llada", "--set", "steps"), "--set: got 'steps', expected KEY=VALUE"),
        (("--strategies", "ar"), "For this model: llada, "),
    ],
)
def test_strategies_that_cannot_be_measured(run, prompts, args, message) -> None:
    for command in (("bench", "--prompts", prompts), ("bench", "policies")):
        code, stdout, stderr = run(*command, "--model", LLADA, *args)
        assert (code, stdout) == (1, "")
        assert message in stderr


def test_policies_are_measured_and_written(run, tmp_path, keep_threads) -> None:
    path = tmp_path / "policies.jsonl"
    args = ("bench", "policies", "--model", LLADA, "-n", "6", "--runs", "2", "--threads", "1")
    out = ("--out", str(path))
    code, stdout, stderr = run(*args, "--strategies", "fast-dllm", "--set", "cache=none", *out)
    assert code == 0, stderr
    *lines, last = stdout.splitlines()
    document = json.loads(last)
    assert path.read_text().splitlines() == [last]
    assert document["kind"] == "policies"
    assert document["settings"]["bar"] == 1.05
    (row,) = document["rows"]
    assert (row["strategy"], row["parameters"]) == ("fast-dllm", {"cache": "none"})
    assert (row["num_forwards"], len(row["ratios"])) == (6, 2)
    (cells,) = (line.split() for line in lines if line.startswith("fast-dllm"))
    assert cells[1:3] == ["cache=none", "6"]
    assert float(cells[5]) == pytest.approx(row["ratio"], abs=1e-3)
    assert "preset 1/1" in stderr
