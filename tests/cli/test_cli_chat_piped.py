"""`hybrid chat` without a terminal: one message per line, plain text, no control codes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ANSWER = "Hello brave new **world**, it works.\n"


def test_each_line_is_a_message(piped) -> None:
    done = piped("hello", "chat", stdin=b"one\n\n  \ntwo\n/temperature 0.5\n/quit\nthree\n")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode() == ANSWER * 2 + "temperature: 0.5 (sampled)\n"


def test_what_is_denoised_is_written_as_it_becomes_final(piped) -> None:
    done = piped("denoises", "chat", "--set", "steps=4", stdin=b"hi\n/strategy\n")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode() == (
        "one two three four\nstrategy: llada steps=4 (of llada, fast-dllm)\n"
    )


def test_input_without_last_newline_and_empty_input(piped) -> None:
    assert piped("hello", "chat", stdin=b"one").stdout.decode() == ANSWER
    done = piped("hello", "chat")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize("env", [{}, {"FORCE_COLOR": "1"}, {"TERM": "dumb"}, {"NO_COLOR": "1"}])
def test_no_control_codes_whatever_the_environment_says(piped, env) -> None:
    lines = b"hi\n/help\n/stats\n/legend\n/system \x1b[31mred\n/oops\n"
    done = piped("evil", "chat", stdin=lines, **env)
    text = (done.stdout + done.stderr).decode()
    assert done.returncode == 1  # /oops
    assert not [c for c in text if (ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160]
    assert "␛[31mred␇" in text
    assert "[bold]markup[/bold]" in text


def test_errors_go_to_stderr_and_the_chat_goes_on(piped) -> None:
    done = piped("hello", "chat", stdin=b"/strategy oracle\n/load\nhi\n")
    assert done.stdout.decode() == ANSWER
    assert done.returncode == 1
    first, second = done.stderr.decode().splitlines()
    assert first.startswith("Error: strategy: got 'oracle'.")
    assert second.startswith("Error: /load needs a file")


def test_a_full_context_is_said_and_reset_helps(piped) -> None:
    # The context holds 12 words: the first exchange fits, the second does not.
    done = piped("small", "chat", stdin=b"one two three\nfour five six\n/reset\nseven\n")
    assert done.stdout.decode() == ANSWER + "The conversation is empty again.\n" + ANSWER
    (error,) = done.stderr.decode().splitlines()
    assert "the context 12" in error
    assert "/reset" in error


def test_a_failure_in_the_middle_keeps_and_marks_the_partial_answer(piped, tmp_path) -> None:
    path = tmp_path / "chat.json"
    done = piped("breaks", "chat", stdin=f"hi\n/save {path}\n".encode())
    assert done.stdout.decode().startswith("Hello brave new **world** [stopped]\n")
    assert done.stderr.decode() == "Error: The drafter broke.\n"
    messages = json.loads(path.read_text())["messages"]
    assert messages[1]["content"] == "Hello brave new **world**"
    assert messages[1]["is_interrupted"]


def test_invalid_utf8_and_ascii_output_do_not_break_the_chat(piped) -> None:
    done = piped("hello", "chat", stdin=b"\xff\xfe\n", PYTHONIOENCODING="utf-8:strict")
    assert (done.stdout.decode(), done.stderr) == (ANSWER, b"")
    done = piped("hello", "chat", stdin=b"hi\n/legend\n", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert b"###--" in done.stdout


def test_ctrl_c_ends_a_piped_chat(environment) -> None:
    driver = Path(__file__).parent / "driver.py"
    process = subprocess.Popen(
        [sys.executable, str(driver), "long", "chat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"hi\n")
    process.stdin.flush()
    assert process.stdout.read(6) == b"word0 "
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (130, b"")
    assert time.monotonic() - begin < 5


def test_a_model_without_chat_template_is_refused(run, fake) -> None:
    code, _, err = run("chat", decoder=fake.FakeDecoder(has_chat_template=False))
    assert code == 1
    assert "no chat template" in err
