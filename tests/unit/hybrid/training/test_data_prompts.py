"""The prompts that are answered, and where a chat template puts a user's turn."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from fakes import BYTES, EOS

from hybrid.errors import ConfigError
from hybrid.models.tiny import byte_tokenizer
from hybrid.models.tokenizer import Tokenizer
from hybrid.training.prompts import read_prompts
from hybrid.training.turns import answer_ids, user_turn


def rows(text: str, name: str = "prompts.jsonl") -> list[dict[str, Any]]:
    return [prompt.row for prompt in read_prompts(text.encode(), name).items]


def templated(template: str | None, *, bos: bool = False, eos: tuple[int, ...] = ()) -> Tokenizer:
    """The byte tokenizer with another template, or one that begins every text with id 0."""
    backend = byte_tokenizer()
    backend.chat_template = template
    if bos:
        from tokenizers.processors import TemplateProcessing

        special = [("<|endoftext|>", 0)]
        backend.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=special
        )
    return Tokenizer(backend, eos)


def test_json_lines_keep_their_fields_and_numbers() -> None:
    text = '\ufeff{"prompt": "a", "id": 7}\n\n{"messages": [{"role": "user"}]}\r\n{"p": [1]}'
    prompts = read_prompts(text.encode(), "x.jsonl")
    assert [prompt.row.get("id") for prompt in prompts.items] == [7, None, None]
    assert [prompt.where for prompt in prompts.items] == [f"x.jsonl line {n}" for n in (1, 3, 4)]
    assert prompts.sha256 == hashlib.sha256(text.encode()).hexdigest()


def test_each_prompt_once() -> None:
    text = '{"prompt": "a", "id": 0}\n{"prompt": "b"}\n{"id": 1, "prompt": "a"}\n{"p": [1]}\n'
    assert rows(text) == [{"prompt": "a", "id": 0}, {"prompt": "b"}, {"p": [1]}]


def test_the_user_turn_of_chatml() -> None:
    turn = user_turn(BYTES)
    assert BYTES.decode(turn.start, skip_special_tokens=False) == "<|im_start|>user\n"
    end = BYTES.decode(turn.end, skip_special_tokens=False)
    assert end == "<|im_end|>\n<|im_start|>assistant\n"
    for text in ("", "a", "some text\n"):
        ids = BYTES.chat([{"role": "user", "content": text}])
        assert ids == [*turn.start, *BYTES.encode(text), *turn.end]


@pytest.mark.parametrize("template", ["nothing", "before {{ messages[0]['content'] }}"])
def test_a_template_without_a_user_turn(template: str) -> None:
    with pytest.raises(ConfigError, match="does not mark where the user's turn ends"):
        user_turn(templated(template))


def test_an_answer_ends_with_eos_unless_it_was_cut() -> None:
    text = BYTES.encode("yes")
    assert answer_ids("yes", BYTES, is_complete=True) == [*text, EOS]
    assert answer_ids("yes", BYTES, is_complete=False) == text
    assert answer_ids("yes<|im_end|>", BYTES, is_complete=True) == [*text, EOS], "once"


def test_of_several_eos_ids_the_one_that_ends_a_turn() -> None:
    chatml = byte_tokenizer().chat_template
    assert answer_ids("y", templated(chatml, eos=(0, EOS)), is_complete=True)[-1] == EOS
    assert answer_ids("y", templated(chatml, eos=(0, 1)), is_complete=True)[-1] == 0
    assert answer_ids("y", templated(None, eos=(0, EOS)), is_complete=True)[-1] == 0


def test_an_answer_does_not_begin_with_bos() -> None:
    tokenizer = templated(None, bos=True)
    assert tokenizer.encode("yes")[0] == 0, "as a prompt does"
    assert answer_ids("yes", tokenizer, is_complete=False) == BYTES.encode("yes")
