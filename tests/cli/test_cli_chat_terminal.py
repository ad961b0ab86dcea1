"""`hybrid chat` in a pseudo-terminal: the keys and the screen as a person meets them."""

from __future__ import annotations

import json
import re
import time

import pytest

pytest.importorskip("pexpect")

_CODES = re.compile(r"\x1b(?:\[[0-9;?]*[a-zA-Z]|\][^\x07]*\x07|[=>])")
DONE = r"context \d+/1000"


def plain(text: str) -> str:
    return _CODES.sub("", text)


def ready(child) -> None:
    child.expect_exact("\x1b[?2004h")  # the editor turns bracketed paste on


def leave(child) -> str:
    """Press Ctrl-D at the next prompt and return what was still shown."""
    ready(child)
    rest = child.before
    child.sendeof()
    rest += child.read()
    child.close()
    assert child.exitstatus == 0
    return rest


def test_a_turn_leaves_markdown_strip_and_status_in_the_scrollback(spawn) -> None:
    child = spawn("hello", "chat")
    ready(child)
    child.send("hi\r")
    shown = leave(child)
    assert "\x1b[?1049h" not in shown  # no alternate screen
    lines = plain(shown).split("\r\n")
    begin = next(i for i, line in enumerate(lines) if line.endswith("brave new world, it works."))
    final = lines[begin : begin + 3]  # Markdown: no asterisks
    assert final[1] == "· ▮▮▯▯ ▮▯▯▯ ▯▯▯▯"
    assert re.fullmatch(
        r"speculative \| [\d.]+ tok/s \| acceptance 2.00 \| TPF 1.00 \| context 8/1000", final[2]
    )


def test_tokens_are_tinted_and_the_cursor_comes_back(spawn) -> None:
    child = spawn("hello", "chat")
    ready(child)
    child.send("hi\r")
    child.expect(r"\x1b\[\?25l")  # Live hides the cursor
    child.expect("38;5;28m brave new")
    child.expect(r"38;5;166m \*\*world\*\*")
    child.expect(r"\x1b\[\?25h")
    child.expect(DONE)
    leave(child)


def test_a_block_is_filled_out_of_order_before_the_eyes(spawn) -> None:
    child = spawn("denoises", "chat")
    child.expect("fake, llada")
    ready(child)
    child.send("/strategy fast-dllm threshold=0.8\r")
    child.expect("strategy: fast-dllm threshold=0.8 ")
    ready(child)
    child.send("hi\r")
    ready(child)
    shown = child.before
    child.sendeof()
    # A slow machine may leave out frames, but not the first one.
    frames = ["░░three ░", "one ░three ░", "one ░three four", "one two three four"]
    places = [plain(shown).find(frame) for frame in frames]
    assert min(places[0], places[-1]) >= 0
    assert (seen := [place for place in places if place >= 0]) == sorted(seen)
    assert "\x1b[2m░" in shown
    assert "\x1b[38;5;98mthree " in shown
    last = plain(shown).rindex("one two three four")
    assert "fast-dllm | " in plain(shown)[last:]
    assert "4 denoising | TPF 1.00" in plain(shown)[last:]


def test_ctrl_c_stops_the_answer_and_keeps_it(spawn, tmp_path) -> None:
    path = tmp_path / "chat.json"
    child = spawn("long", "chat")
    ready(child)
    child.send("hi\r")
    child.expect("word2")
    child.sendintr()
    child.expect(r"\[stopped\]")
    child.expect(DONE)
    ready(child)
    child.send(f"/save {path}\r")
    child.expect("Saved 2 messages")
    leave(child)
    user, answer = json.loads(path.read_text())["messages"]
    assert user == {"role": "user", "content": "hi", "is_interrupted": False}
    assert answer["is_interrupted"]
    assert answer["content"].startswith("word0 and word1 and word2 ")
    assert "word199" not in answer["content"]


def test_a_second_ctrl_c_ends_a_step_that_does_not_return(spawn) -> None:
    child = spawn("stuck", "chat")
    ready(child)
    child.send("hi\r")
    child.expect("reading")
    child.sendintr()
    time.sleep(0.3)  # two signals at the same instant are one
    child.sendintr()
    child.expect("the message was not kept")
    leave(child)


def test_ctrl_c_at_the_prompt_clears_and_twice_quits(spawn) -> None:
    child = spawn("hello", "chat")
    ready(child)
    child.send("/oops")
    child.sendintr()
    child.expect("Ctrl-C again or Ctrl-D quits")
    ready(child)
    child.send("/temperature\r")  # not "/oops/temperature"
    child.expect(r"temperature: 0 \(greedy\)")
    ready(child)
    child.sendintr()
    child.expect("Ctrl-C again")
    ready(child)
    child.sendintr()
    child.read()
    child.close()
    assert child.exitstatus == 0


def test_commands_errors_and_quit(spawn) -> None:
    child = spawn("hello", "chat")
    for line, expected in [
        ("/help", "/legend"),
        ("/strateg", r"Did you mean /strategy\?"),
        ("/strategy ar", "strategy: ar"),
        ("/temperature hot", "expected a number"),
        ("/system Be brief.", r"system: Be brief\."),
        ("/stats", "No answer yet"),
        ("/legend", "accepted by the verifier"),
        ("/load /no/such/file", "Cannot load"),
    ]:
        ready(child)
        child.send(line + "\r")
        child.expect(expected)
    ready(child)
    child.send("/quit\r")
    child.read()
    child.close()
    assert child.exitstatus == 0


def test_multi_line_input_and_history(spawn, tmp_path) -> None:
    path = tmp_path / "chat.json"
    child = spawn("hello", "chat")
    ready(child)
    child.send("first\x1b\rsecond\r")  # Alt-Enter begins a line
    child.expect(DONE)
    ready(child)
    child.send("\x1b[A\r")  # arrow up: the message again
    child.expect(DONE)
    ready(child)
    child.send(f"/save {path}\r")
    child.expect("Saved 4")
    leave(child)
    contents = [m["content"] for m in json.loads(path.read_text())["messages"]]
    assert contents[0] == contents[2] == "first\nsecond"
    history = tmp_path / "state" / "chat_history"
    assert "+first\n+second\n" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_no_color_has_no_colour(spawn) -> None:
    child = spawn("hello", "chat", NO_COLOR="1")
    ready(child)
    child.send("hi\r")
    child.expect(DONE)
    ready(child)
    child.send("/legend\r")
    child.expect("The last answer")
    everything = child.before + leave(child)
    colours = [
        code
        for match in re.findall(r"\x1b\[([0-9;]*)m", everything)
        for code in match.split(";")
        if code.isdigit() and (30 <= int(code) <= 48 or 90 <= int(code) <= 107) and code != "39"
    ]
    assert colours == []


def test_a_dumb_terminal_gets_plain_text_and_a_prompt(spawn) -> None:
    child = spawn("hello", "chat", TERM="dumb")
    child.expect_exact("\r\n> ")
    child.send("hi\n")
    child.expect_exact("Hello brave new **world**, it works.\r\n> ")
    before = child.before
    child.sendintr()
    child.expect_exact("quits)\r\n> ")
    before += child.before
    child.sendeof()
    assert "\x1b" not in before + child.read()


@pytest.mark.parametrize("columns", [40, 20])
def test_narrow_terminal(spawn, columns) -> None:
    child = spawn("hello", "chat", columns=columns, rows=12)
    ready(child)
    child.send("hi\r")
    ready(child)
    shown = plain(child.before)
    for part in ("speculative", "tok/s", "acceptance 2.00", "TPF 1.00", "context 8/1000", "▮▮▯▯"):
        assert part in shown
    child.send("/help\r")
    child.expect("/quit")
    leave(child)


def test_model_output_cannot_drive_the_terminal(spawn) -> None:
    child = spawn("evil", "chat")
    ready(child)
    child.send("hi\r")
    child.expect(DONE)
    ready(child)
    shown = child.before
    child.send("/legend\r")
    child.expect("The last answer")
    shown += child.before + leave(child)
    # Rich itself writes colours, cursor movement and erasing; none of these four.
    for forbidden in ("\x1b[31mred", "\x9b", "\x1b]0;", "\x1b[2J"):
        assert forbidden not in shown
    assert "[bold]markup[/bold]" in plain(shown)
