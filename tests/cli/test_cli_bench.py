"""`hybrid bench` end to end on a tiny model: tables, the JSON document, the file, the errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from hybrid.models.tiny import tiny_checkpoint

QUICK = ("--max-new-tokens", "6", "--limit", "2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def keep_threads() -> Any:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_tables_then_one_json_document(run, model, tmp_path, keep_threads) -> None:
    out = tmp_path / "results" / "cpu.jsonl"
    args = ("bench", "--model", model, *QUICK, "--dtype", "float32", "--also-dtype", "bfloat16")
    code, stdout, stderr = run(*args, "--threads", "1", "--out", str(out))
    assert code == 0, stderr
    lines = stdout.splitlines()
    document = json.loads(lines[-1])
    assert out.read_text().splitlines() == [lines[-1]]
    table = "\n".join(lines[:-1])
    assert "× transformers float32" in table
    assert "transformers float32: 2/2" in table
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
        assert len(row["seconds"]) == len(row["num_tokens"]) == 2
        assert set(row["tokens_per_second"]) == {"p20", "p50", "p80"}
        assert set(row["forwards"]) == {"prefill", "draft", "verify"}
        assert row["verifier"] == "greedy"
    assert [rows[n]["greedy_match"] for n in expected[:3]] == [True, True, True]
    assert [rows[n]["reference"] for n in expected[3:]] == [None, "bfloat16 ar", "bfloat16 ar"]
    assert [rows[n]["drafter"] for n in expected[:3]] == ["none", "ngram", "ngram"]


def test_json_alone_without_transformers(run, model, tmp_path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"p": [5, 6, 7]}\n{"prompt": "hello"}\n')
    args = ("bench", "--model", model, "--json", "--no-transformers", "-n", "4")
    options = ("--strategies", "auto,ngram,auto", "--num-draft-tokens", "2")
    code, stdout, _ = run(*args, *options, "--prompts", str(prompts))
    assert code == 0
    document = json.loads(stdout)
    assert [row["strategy"] for row in document["rows"]] == ["auto", "ngram"]
    assert all(row["ratios"] == {} and row["reference"] is None for row in document["rows"])
    assert document["settings"]["num_prompt_tokens"][0] == 3
    assert document["settings"]["prompts"] == "prompts.jsonl"
    assert all(row["num_draft_tokens"] <= 2 for row in document["rows"])


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
    assert "float32 ar: 0/2" in stdout
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
