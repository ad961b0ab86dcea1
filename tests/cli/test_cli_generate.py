"""`hybrid generate` and what all commands share: exit codes, streams, errors, start-up."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest

from hybrid import __version__
from hybrid.cli.options import SamplingOptions
from hybrid.errors import CheckpointError, ConfigError
from hybrid.params import SamplingParams

ANSWER = "Hello brave new **world**, it works.\n"


def test_stdout_is_the_answer_alone_and_stats_go_to_stderr(run, fake) -> None:
    decoder = fake.FakeDecoder()
    code, out, err = run("generate", "hi", "--stats", decoder=decoder)
    assert (code, out) == (0, ANSWER)
    assert "acceptance length" in err
    assert "2.00" in err  # 6 tokens in 3 verify passes
    assert decoder.requests == [
        ([{"role": "user", "content": "hi"}], SamplingParams(), "speculative")
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
    assert decoder.requests[0][1:] == (SamplingParams(**wanted), "ar")


def test_no_sampling_parameter_lacks_a_flag() -> None:
    assert {f.name for f in fields(SamplingOptions)} == set(SamplingParams.model_fields)
    assert SamplingOptions().to_params() == SamplingParams()


def test_model_flags_reach_the_loader(run, fake, monkeypatch) -> None:
    seen = []
    from hybrid.cli import options

    monkeypatch.setattr(options, "load_decoder", lambda o: seen.append(o) or fake.FakeDecoder())
    args = "--model m --device cpu --dtype float32 --drafter ngram --verifier block"
    run("generate", "hi", *args.split(), "--num-draft-tokens", "5", "--adapter", "a")
    assert seen == [options.ModelOptions("m", "cpu", "float32", "a", "ngram", "block", 5)]


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
