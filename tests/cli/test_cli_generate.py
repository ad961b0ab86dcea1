"""`hybrid generate` and what all commands share: exit codes, streams, errors, start-up."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest

from hybrid import __version__
from hybrid.cli.options import SamplingOptions
from hybrid.errors import CheckpointError, ConfigError
from hybrid.models.tiny import tiny_checkpoint
from hybrid.params import SamplingParams
from hybrid.strategy import Strategy
from hybrid.types import Context

ANSWER = "Hello brave new **world**, it works.\n"


def test_stdout_is_the_answer_alone_and_stats_go_to_stderr(run, fake) -> None:
    decoder = fake.FakeDecoder()
    code, out, err = run("generate", "hi", "--stats", decoder=decoder)
    assert (code, out) == (0, ANSWER)
    assert "acceptance length" in err
    assert "2.00" in err  # 6 tokens in 3 verify passes
    assert decoder.requests == [
        ([{"role": "user", "content": "hi"}], SamplingParams(), Strategy.preset("speculative"))
    ]
    assert decoder.num_closed == 1


def test_json_is_one_document_with_the_whole_result(run, fake) -> None:
    code, out, err = run("generate", "hi", "--json", decoder=fake.FakeDecoder())
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert document["text"] + "\n" == ANSWER
    assert (document["model"], document["strategy"]) == ("fake", "speculative")
    assert document["stats"]["num_accepted"] == 3
    assert out.isascii()


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--raw",), "hi"),
        (("--chat",), [{"role": "user", "content": "hi"}]),
        (
            ("--system", "short"),
            [{"role": "system", "content": "short"}, {"role": "user", "content": "hi"}],
        ),
    ],
)
def test_prompt_is_raw_or_a_chat(run, fake, args, expected) -> None:
    decoder = fake.FakeDecoder()
    assert run("generate", "hi", *args, decoder=decoder)[0] == 0
    assert decoder.requests[0][0] == expected


def test_a_model_without_chat_template_gets_the_raw_prompt(run, fake) -> None:
    decoder = fake.FakeDecoder(has_chat_template=False)
    assert run("generate", "hi", decoder=decoder)[0] == 0
    assert decoder.requests[0][0] == "hi"


def test_every_sampling_flag_reaches_the_decoder(run, fake) -> None:
    wanted = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "seed": 11,
        "max_new_tokens": 33,
        "min_new_tokens": 2,
        "stop": ("a", "b c"),
        "stop_token_ids": (4, 5),
        "ignore_eos": True,
        "logprobs": 3,
    }
    args = ["--stop=a", "--stop", "b c", "--stop-token-id=4", "--stop-token-id=5", "--ignore-eos"]
    for name, value in wanted.items():
        if name not in {"stop", "stop_token_ids", "ignore_eos"}:
            args += [f"--{name.replace('_', '-')}", str(value)]
    decoder = fake.FakeDecoder()
    assert run("generate", "hi", *args, "--strategy", "ar", decoder=decoder)[0] == 0
    assert decoder.requests[0][1:] == (SamplingParams(**wanted), Strategy.preset("ar"))


def test_no_sampling_parameter_lacks_a_flag() -> None:
    assert {f.name for f in fields(SamplingOptions)} == set(SamplingParams.model_fields)
    assert SamplingOptions().to_params() == SamplingParams()


def test_model_flags_reach_the_loader(run, fake, monkeypatch) -> None:
    seen = []
    from hybrid.cli import options

    monkeypatch.setattr(options, "load_decoder", lambda o: seen.append(o) or fake.FakeDecoder())
    args = "--model m --device cpu --dtype float32 --drafter ngram --verifier block"
    run("generate", "hi", *args.split(), "--num-draft-tokens", "5", "--adapter", "a", "--exact")
    assert seen == [options.ModelOptions("m", "cpu", "float32", "a", "ngram", "block", 5, True)]


def test_a_hybrid_error_is_one_line_and_exit_code_1(run, fake, monkeypatch) -> None:
    from hybrid.cli import options

    def fail(_: object) -> None:
        raise CheckpointError("No such model.\nTry default.")

    monkeypatch.setattr(options, "load_decoder", fail)
    assert run("generate", "hi") == (1, "", "Error: No such model. Try default.\n")
    code, out, err = run("generate", "hi", "--temperature", "-1")
    assert (code, out) == (1, "")
    assert err.startswith("Error: temperature: got -1.0")
    code, _, err = run("generate", "hi", "--strategy", "speculativ", decoder=fake.FakeDecoder())
    assert code == 1
    assert "Did you mean 'speculative'" in err


@pytest.mark.parametrize(
    "args",
    [
        ("generate",),
        ("generate", "hi", "--temperature", "warm"),
        ("generate", "hi", "--no-such-flag"),
        ("generate", "hi", "--raw", "--system", "x"),
        ("nothing",),
    ],
)
def test_wrong_usage_is_exit_code_2(run, fake, args) -> None:
    code, out, err = run(*args, decoder=fake.FakeDecoder())
    assert (code, out) == (2, "")
    assert "Traceback" not in err


def test_version_and_help(run) -> None:
    assert run("--version") == (0, f"hybrid-decoder {__version__}\n", "")
    for command in ("generate", "chat", "doctor", "list", "plan-memory"):
        code, out, _ = run(command, "--help")
        assert code == 0
        assert "Examples:" in out
        assert f"hybrid {command}" in out


def test_stdin_prompt(piped) -> None:
    done = piped("hello", "generate", "-", stdin="héllo\n".encode())
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, ANSWER, b"")
    bad = piped("hello", "generate", "-", stdin=b"\xff")
    assert (bad.returncode, bad.stdout) == (1, b"")
    assert bad.stderr.startswith(b"Error: The prompt is not valid UTF-8")


def test_pipe_gets_the_text_unchanged_and_terminal_gets_it_cleaned(piped, spawn) -> None:
    assert b"\x1b[31mred\x07" in piped("evil", "generate", "hi").stdout
    child = spawn("evil", "generate", "hi")
    shown = child.read()
    assert "\x1b" not in shown
    assert "␛[31mred␇" in shown


def test_ctrl_c_keeps_what_was_streamed_and_exits_130(environment) -> None:
    driver = Path(__file__).parent / "driver.py"
    process = subprocess.Popen(
        [sys.executable, str(driver), "long", "generate", "hi"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env=environment,
    )
    assert process.stdout is not None
    assert process.stdout.read(6) == b"word0 "
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert (out[-1:], err) == (b"\n", b"")


def test_a_closed_pipe_is_quiet(environment) -> None:
    driver = Path(__file__).parent / "driver.py"
    process = subprocess.Popen(
        [sys.executable, str(driver), "long", "generate", "hi"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env=environment,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=10) == 1
    assert process.stderr.read() == b""


def test_help_starts_fast_and_without_torch(environment) -> None:
    code = (
        "import sys; sys.argv = ['hybrid', '--help']\n"
        "from hybrid.cli import main\n"
        "try: main.main()\n"
        "finally: print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=environment, text=True, timeout=30
    )
    assert done.stdout.strip().endswith("[]"), done
    assert "generate" in done.stdout
    # 0.2 s on a quiet machine; torch alone would take seconds.
    assert time.perf_counter() - begin < 2


def test_an_error_message_brings_no_control_characters(run, fake) -> None:
    decoder = fake.FakeDecoder(error={0: ConfigError("bad \x1b]0;title\x07 template")})
    code, _, err = run("generate", "hi", decoder=decoder)
    assert code == 1
    assert "Error: bad" in err
    assert not any(c in err for c in "\x1b\x07")


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt_is_an_error(run, fake, prompt) -> None:
    code, out, err = run("generate", prompt, decoder=fake.FakeDecoder())
    assert (code, out) == (1, "")
    assert "empty prompt" in err


# Strategies and their parameters


def test_without_a_strategy_the_weights_decide(run, fake) -> None:
    for decoder, expected in (
        (fake.FakeDecoder(), "speculative"),
        (fake.DenoisingDecoder(), "llada"),
    ):
        code, out, _ = run("generate", "hi", "--json", decoder=decoder)
        assert (code, json.loads(out)["strategy"]) == (0, expected)
        assert decoder.requests[0][2] == Strategy.preset(expected)


def test_set_gives_parameters_and_json_names_all_of_them(run, fake) -> None:
    decoder = fake.DenoisingDecoder()
    args = ("--strategy", "fast-dllm", "--set", "threshold=0.8", "--set", "cache=none", "--json")
    code, out, _ = run("generate", "hi", *args, decoder=decoder)
    document = json.loads(out)
    assert code == 0
    assert decoder.requests[0][2] == Strategy.preset("fast-dllm", threshold=0.8, cache="none")
    assert document["parameters"] == {
        "block_size": 32, "threshold": 0.8, "factor": None, "steps": None, "cache": "none",
    }  # fmt: skip
    assert (document["drafter"], document["verifier"]) == (None, None)
    assert document["stats"]["num_denoise_forwards"] == 4


def test_set_without_a_strategy_is_for_the_default_one(run, fake) -> None:
    decoder = fake.DenoisingDecoder()
    assert run("generate", "hi", "--set", "steps=7", decoder=decoder)[:2] == (
        0,
        "one two three four\n",
    )
    assert decoder.requests[0][2] == Strategy.preset("llada", steps=7)


def test_stats_count_denoising_forwards(run, fake) -> None:
    args = ("--stats", "--set", "steps=7")
    code, _, err = run("generate", "hi", *args, decoder=fake.DenoisingDecoder())
    text = " ".join(err.split())
    assert code == 0
    assert "model fake, strategy llada, parameters steps=7 remasking=low_confidence" in text
    assert "verifier" not in text
    assert "forwards 4 (0 prefill, 0 draft, 0 verify, 4 denoising)" in text
    code, _, err = run("generate", "hi", "--stats", "--strategy", "ar", decoder=fake.FakeDecoder())
    assert "strategy ar, drafter none, verifier greedy" in " ".join(err.split())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--strategy", "d3lm"), "Did you mean 'd3llm'?"),
        (("--strategy", "llada", "--set", "step=3"), "Did you mean 'steps'?"),
        (("--strategy", "llada", "--set", "steps=0"), "greater than or equal to 1"),
        (("--strategy", "llada", "--set", "steps=many"), "expected a valid integer"),
        (("--strategy", "llada", "--set", "steps"), "--set: got 'steps', expected KEY=VALUE"),
        (("--strategy", "llada", "--set", "name=x"), "no parameter 'name'"),
        (("--strategy", "llada", "--set", "self=x"), "no parameter 'self'"),
        (("--set", "blok_size=3"), "Did you mean 'block_size'?"),
        (("--strategy", "llada"), "For this model: ar, speculative, hybrid, ngram, dflash"),
    ],
)
def test_a_strategy_that_cannot_be_is_one_line(run, fake, args, message) -> None:
    code, out, err = run("generate", "hi", *args, decoder=fake.FakeDecoder())
    assert (code, out) == (1, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_wrong_strategy_is_refused_before_the_model_is_loaded(run, monkeypatch) -> None:
    from hybrid.cli import options

    monkeypatch.setattr(options, "load_decoder", lambda _: pytest.fail("loaded"))
    for command in (("generate", "hi"), ("chat",), ("bench",), ("bench", "policies")):
        flag = "--strategies" if "bench" in command else "--strategy"
        code, _, err = run(*command, flag, "llada", "--set", "step=1")
        assert code == 1
        assert "Did you mean 'steps'?" in err


def test_allow_unverified_reaches_the_decoder(run, fake) -> None:
    decoder = fake.DenoisingDecoder()
    decoder.backbone.context = Context.BLOCK_CAUSAL
    code, _, err = run("generate", "hi", "--strategy", "speculative", decoder=decoder)
    assert code == 1
    assert "allow_unverified=True" in err
    args = ("--strategy", "speculative", "--allow-unverified")
    assert run("generate", "hi", *args, decoder=decoder)[0] == 0
    assert run("generate", "hi", *args, "--json", decoder=decoder)[0] == 0


# Strategy "hybrid"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.mark.parametrize("sampled", [(), ("--temperature", "0.8", "--seed", "1")])
def test_a_recorded_run_can_be_explained(run, model, tmp_path, sampled) -> None:
    path = str(tmp_path / "runs" / "run.jsonl")
    words = ("generate", "ab ab ab ab", "--model", model, "-n", "30", "--ignore-eos", *sampled)
    code, out, _ = run(*words, "--strategy", "hybrid", "--record", path, "--json")
    assert code == 0
    result = json.loads(out)
    code, out, err = run("explain", path, "--json")
    assert (code, err) == (0, "")
    reasons = [json.loads(line) for line in out.splitlines()]
    assert all(reason["agrees"] for reason in reasons)
    assert sum(reason["num_committed"] for reason in reasons) == 29  # the prefill's is not decided
    counts = Counter(reason["mode"] for reason in reasons)
    assert counts == result["stats"]["forwards_by_mode"]  # copied drafts cost no pass
    code, out, _ = run("explain", path)
    assert f"1 rows, {len(reasons)} steps, 29 tokens" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--risk", "0.5"), "no profile that says which tokens can be trusted. Make one with"),
        (("--risk", "0.5", "--strategy", "ar"), "got 0.5 for strategy 'ar', expected 'hybrid'"),
        (("--risk", "1.5"), "risk: got 1.5, expected less than 1"),
        (("--risk", "0.5", "--set", "profile=missing.json"), "missing.json is not a profile"),
        (("--strategy", "hybrid", "--set", "modes=ar,prefill"), "modes: got prefill, expected"),
        (("--strategy", "hybrid", "--set", "block_size=99"), "got 98, expected at most 7"),
        (("--record", "run.jsonl"), "record: got strategy 'speculative', expected 'hybrid'"),
    ],
)  # fmt: skip
def test_what_the_router_cannot_do_is_one_line(
    run, model, tmp_path, monkeypatch, args, message
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run("generate", "hi", "--model", model, "-n", "4", *args)
    assert (code, out) == (1, "")
    assert message in err
    assert err.count("\n") == 1 + err.count(" ...\n")
    assert list(tmp_path.iterdir()) == []
