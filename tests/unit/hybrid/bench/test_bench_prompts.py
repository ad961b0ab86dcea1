"""The prompts of `hybrid bench`: what becomes of them, and which files hold them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybrid import HybridDecoder
from hybrid.bench.prompts import PROMPTS, encode_prompts, read_prompts
from hybrid.errors import ConfigError
from hybrid.models.tiny import tiny_checkpoint
from hybrid.prompt_files import prompt_ids
from hybrid.training.prompts import read_prompts as training_prompts


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> HybridDecoder:
    return HybridDecoder.from_pretrained(tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


def test_prompts_become_chat_messages_or_stay_ids(decoder) -> None:
    assert len(set(PROMPTS)) == 20
    chat = [{"role": "user", "content": "hi"}]
    encoded = encode_prompts(["hi", chat, [4, 5]], decoder)
    assert encoded[0] == encoded[1] == decoder.tokenizer.chat(chat)
    assert encoded[2] == [4, 5]
    with pytest.raises(ConfigError, match="prompt 1.*token id"):
        encode_prompts(["hi", [10**9]], decoder)


PROMPT_FILES = {
    "text.jsonl": '{"prompt": "one"}\n\n{"prompt": "a\u2028b"}\n',
    "ids.jsonl": '{"p": [1, 2]}\n{"prompt": "two", "p": [1, 2], "r": [3]}\n',
    "chat.jsonl": '\ufeff{"messages": [{"role": "user", "content": "one"}], "prompt": "other"}\r\n',
    "plain.txt": "Why?\n\n{not json}\n a\u2028b \n",
    "no-suffix": "Why?\nHow?\n",
}


@pytest.mark.parametrize("name", PROMPT_FILES)
def test_a_prompt_file_is_read_as_data_generate_reads_it(decoder, tmp_path, name) -> None:
    (tmp_path / name).write_text(PROMPT_FILES[name], encoding="utf-8", newline="")
    answered = training_prompts((tmp_path / name).read_bytes(), name).items
    tokenizer, size = decoder.tokenizer, decoder.backbone.vocab_size
    expected = [prompt_ids(prompt.row, tokenizer, size, prompt.where) for prompt in answered]
    found = read_prompts(tmp_path / name)
    assert encode_prompts([prompt.content for prompt in found], decoder) == expected


def test_a_prompt_file_keeps_categories_and_repeated_prompts(tmp_path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = ['{"prompt": "one", "category": "chat"}', '{"p": [1], "category": 2}', '{"p": [1]}']
    file.write_text("\n".join(lines))
    assert [prompt.category for prompt in read_prompts(file)] == ["chat", "2", None]
    for text, message in (
        ('{"q": 1}', "line 1: got no prompt"),
        ('{"prompt": "one"}\n[]', "line 2: expected an object"),
        ("nonsense", "line 1: not JSON"),
        ("", "is empty"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_prompts(file)
    with pytest.raises(ConfigError, match="prompts: .* cannot be read"):
        read_prompts(tmp_path / "none.jsonl")


def test_no_held_out_prompt_was_trained_on() -> None:
    folder = Path(__file__).parents[4] / "benchmarks"
    trained, held_out = (
        {json.loads(line)["prompt"] for line in (folder / name).read_text("utf-8").splitlines()}
        for name in ("prompts-train.jsonl", "prompts-heldout.jsonl")
    )
    assert len(held_out) == 90
    assert len(trained) > 3900
    assert not trained & held_out
