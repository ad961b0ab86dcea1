"""Files of prompts: what a line may hold, which lines are refused, and how a prompt becomes ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakes import BYTES

from hybrid.errors import ConfigError
from hybrid.models.tiny import byte_tokenizer
from hybrid.models.tokenizer import Tokenizer
from hybrid.prompt_files import prompt_ids, prompt_rows, read_bytes


def rows(text: str, name: str = "prompts.jsonl") -> list[dict[str, Any]]:
    return [row for _, row in prompt_rows(text.encode(), name)]


def untemplated() -> Tokenizer:
    backend = byte_tokenizer()
    backend.chat_template = None
    return Tokenizer(backend, ())


def test_lines_keep_their_fields_their_order_and_their_numbers() -> None:
    text = '\ufeff{"prompt": "a", "id": 7}\n\n{"messages": [{"role": "user"}]}\r\n{"prompt": "a"}'
    found = prompt_rows(text.encode(), "x.jsonl")
    assert [where for where, _ in found] == [f"x.jsonl line {n}" for n in (1, 3, 4)]
    first, chat, again = (row for _, row in found)
    assert (first, again) == ({"prompt": "a", "id": 7}, {"prompt": "a"})
    assert chat == {"messages": [{"role": "user"}]}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.txt", " one\u2028x \n\n{two}\r\n", ["one\u2028x", "{two}"]),
        ("stdin", "one\n{two}\n", ["one", "{two}"]),
        ("stdin", '{"prompt": "one"}\n', ["one"]),
        ("prompts", '\n {"prompt": "one"}\n', ["one"]),
    ],
)
def test_texts_and_json_are_told_apart(name: str, text: str, expected: list[str]) -> None:
    assert [row["prompt"] for row in rows(text, name)] == expected


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "prompts.jsonl is empty"),
        (" \n\n", "prompts.jsonl is empty"),
        ("why is the sky blue?", "line 1: not JSON"),
        ('{"prompt": "a"}\n{"prompt":', "line 2: not JSON"),
        ('{"prompt": "a"}\n["b"]', "line 2: expected an object, got list"),
        ('{"prompt": "a"}\n{"text": "b"}', "line 2: got no prompt"),
        ('{"prompt": ""}', "line 1: got no prompt"),
        ('{"messages": [], "prompt": null}', "line 1: got no prompt"),
        ("[" * 100_000, "line 1: not JSON"),
    ],
)
def test_a_bad_prompt_file(text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        rows(text)


def test_prompts_that_are_not_text() -> None:
    with pytest.raises(ConfigError, match=r"prompts.jsonl is not UTF-8"):
        prompt_rows(b"\xff\xfe{", "prompts.jsonl")


def test_a_file_that_cannot_be_read_is_named_as_it_was_given(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^prompts: .*none.txt cannot be read: No such file"):
        read_bytes(tmp_path / "none.txt", "prompts")


def test_text_goes_before_ids_where_there_is_a_tokenizer() -> None:
    row = {"prompt": "x", "p": [5], "messages": None}
    chat = [{"role": "user", "content": "x"}]
    assert prompt_ids(row, BYTES, 300, "here") == BYTES.chat(chat)
    assert prompt_ids(row, None, 300, "here") == [5]
    assert prompt_ids(row, untemplated(), 300, "here") == BYTES.encode("x"), "no template: raw"
    with pytest.raises(ConfigError, match="here: got no prompt"):
        prompt_ids({"prompt": " \n"}, BYTES, 300, "here")
    with pytest.raises(ConfigError, match=r"here: messages\[0\]: got role None"):
        prompt_ids({"messages": [{"content": "x"}]}, BYTES, 300, "here")
