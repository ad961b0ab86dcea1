"""What is read is what the file says; what cannot be used is named by its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes import BYTES, EOS

from hybrid.errors import ConfigError
from hybrid.training.data import Example, data_sha256, read_examples, split_examples


def read(path: Path, text: str | bytes, *, tokenizer: object = None) -> list[Example]:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_examples(path, vocab_size=300, max_length=40, tokenizer=tokenizer)


def test_reads_ids_and_skips_empty_lines(tmp_path: Path) -> None:
    text = '{"p": [1, 2], "r": [3, 4], "prompt": "more"}\r\n\n{"p": [5], "r": [6, 7, 299]}'
    examples = read(tmp_path / "d", text)
    assert examples == [Example((1, 2), (3, 4)), Example((5,), (6, 7, 299))]
    assert examples[1].tokens == [5, 6, 7, 299]


def test_reads_texts_through_the_chat_template(tmp_path: Path) -> None:
    line = json.dumps({"prompt": "hi", "response": "yes"})
    path = tmp_path / "d"
    path.write_text(line)
    (example,) = read_examples(path, vocab_size=300, max_length=80, tokenizer=BYTES)
    assert list(example.prompt) == BYTES.chat([{"role": "user", "content": "hi"}])
    assert list(example.response) == [*BYTES.encode("yes"), EOS]


def texts(path: Path, row: dict[str, object]) -> list[Example]:
    path.write_text(json.dumps(row))
    return read_examples(path, vocab_size=300, max_length=80, tokenizer=BYTES)


def test_a_response_that_was_cut_has_no_eos(tmp_path: Path) -> None:
    row = {"prompt": "hi", "response": "yes", "finish_reason": "length"}
    assert list(texts(tmp_path / "d", row)[0].response) == BYTES.encode("yes")
    row["finish_reason"] = "stop"
    assert texts(tmp_path / "d", row)[0].response[-1] == EOS


def test_reads_messages(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "x"}, {"role": "user", "content": "hi"}]
    (example,) = texts(tmp_path / "d", {"messages": chat, "response": "yes"})
    assert list(example.prompt) == BYTES.chat(chat)


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"response": "yes"}, "line 1: expected an object with ids"),
        ({"prompt": "hi"}, "line 1: expected an object with ids"),
        ({"prompt": " ", "response": "yes"}, "line 1: got no prompt"),
        ({"prompt": "hi", "response": ""}, "line 1: got an empty response"),
        ({"prompt": "hi", "response": " \n"}, "line 1: got an empty response"),
        ({"prompt": "hi", "response": ["yes"]}, "line 1: expected an object with ids"),
        ({"prompt": 7, "response": "yes"}, "line 1: got a int"),
        ({"prompt": "hi", "response": "\ud800"}, "line 1: .*surrogate"),
    ],
)
def test_bad_texts_are_named(tmp_path: Path, row: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        texts(tmp_path / "d", row)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    assert read(tmp_path / "d", b"\xef\xbb\xbf" + b'{"p": [1], "r": [3, 4]}')[0].prompt == (1,)


def test_a_line_separator_inside_a_text_is_no_line_end(tmp_path: Path) -> None:
    path = tmp_path / "d"
    line = json.dumps({"prompt": "a", "response": "b\u2028c\u0085d"}, ensure_ascii=False)
    path.write_text(line, encoding="utf-8")
    (example,) = read_examples(path, vocab_size=300, max_length=80, tokenizer=BYTES)
    assert BYTES.decode(example.response) == "b\u2028c\u0085d"


GOOD = '{"p": [1], "r": [2, 3]}\n'


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ('{"p": [1], "r"', "line 2: not JSON"),
        ("[1, 2]", "line 2: expected an object, got list"),
        ("7", "line 2: expected an object, got int"),
        ("{}", "line 2: expected an object with ids"),
        ("[" * 100_000, "line 2: not JSON"),
        ('{"p": [1]}', "line 2: expected an object"),
        ('{"prompt": "no", "response": "tokenizer"}', "line 2: expected .* with a tokenizer"),
        ('{"p": [], "r": [2, 3]}', "line 2: got 0 prompt and 2 response tokens"),
        ('{"p": [1], "r": []}', "line 2: got 1 prompt and 0 response tokens"),
        ('{"p": [1], "r": [2]}', "line 2: got 1 prompt and 1 response tokens"),
        ('{"p": [1], "r": [2, 300]}', "line 2: got 300, expected token ids from 0 to 299"),
        ('{"p": [-1], "r": [2, 3]}', "line 2: got -1"),
        ('{"p": [1.0], "r": [2, 3]}', "line 2: got 1.0"),
        ('{"p": [true], "r": [2, 3]}', "line 2: got True"),
        ('{"p": ["1"], "r": [2, 3]}', "line 2: got '1'"),
        (json.dumps({"p": [1], "r": [2] * 40}), "line 2: got 41 tokens, expected at most 40"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, bad: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        read(tmp_path / "d", GOOD + bad + "\n" + GOOD)


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_refuses_a_file_without_examples(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="holds no examples"):
        read(tmp_path / "d", text)


def test_refuses_what_is_not_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not UTF-8"):
        read(tmp_path / "d", b"\xff\xfe\x00")


def test_refuses_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path, match in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        for function in (data_sha256, lambda p: read_examples(p, vocab_size=3, max_length=4)):
            with pytest.raises(ConfigError, match=match):
                function(path)


def test_sha256_is_that_of_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "d"
    path.write_bytes(b"abc")
    assert data_sha256(path).startswith("ba7816bf8f01cfea414140de5dae2223")


def examples(*prompts: int) -> list[Example]:
    """Each with a response of its own."""
    return [Example((prompt,), (i, i)) for i, prompt in enumerate(prompts)]


def test_the_last_examples_are_held_out() -> None:
    every = examples(1, 2, 3, 4)
    assert split_examples(every, 1) == (every[:3], every[3:])
    assert split_examples(every, 3) == (every[:1], every[1:])


def test_no_prompt_is_both_learned_and_measured() -> None:
    every = examples(1, 5, 2, 2, 6, 5, 5, 6)
    assert split_examples(every, 3) == ([every[0], every[2], every[3]], every[5:])


def test_refuses_to_leave_nothing_to_learn() -> None:
    with pytest.raises(ConfigError, match="got 2 examples, expected more than num_eval_sequences"):
        split_examples(examples(1, 2), 2)
    with pytest.raises(ConfigError, match="all 2 examples before the held-out ones"):
        split_examples(examples(1, 2, 2, 1), 2)
