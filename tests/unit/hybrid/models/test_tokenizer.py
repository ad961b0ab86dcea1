"""Tokenizer: transformers' ids, text that joins, and messages that are refused."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from transformers import AutoTokenizer

from hybrid.errors import CheckpointError, ConfigError
from hybrid.models.gguf import open_gguf
from hybrid.models.tiny import tiny_checkpoint
from hybrid.models.tokenizer import Tokenizer, load_tokenizer

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi,  you .\n\n1 é 🎉"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": ""},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("tokenizer") / "tiny", num_layers=1)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


def test_ids_are_those_of_transformers(folder, tokenizer):
    reference = AutoTokenizer.from_pretrained(folder)
    for text in ("", " a  b ", "don't , . !", "日本 🎉\n", "<|im_start|>x"):
        assert tokenizer.encode(text) == reference(text)["input_ids"]
    expected = reference.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert tokenizer.chat(CHAT) == reference(expected, add_special_tokens=False)["input_ids"]
    assert tokenizer.vocab_size == len(reference)
    assert tokenizer.eos_token_ids == (reference.eos_token_id,)


def test_text_survives(tokenizer):
    text = " Hello , world . it 's  n't \t\n 日本 🎉"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_left_out_on_request(tokenizer):
    ids = tokenizer.chat([{"role": "user", "content": "x"}])
    assert tokenizer.decode(ids).startswith("user\nx")
    assert tokenizer.decode(ids, skip_special_tokens=False).startswith("<|im_start|>user\nx")


@pytest.mark.parametrize("which", ["tiny", "default"])
def test_text_of_a_prefix_is_a_prefix(which, tokenizer, default_model):
    if which == "default":
        tokenizer = load_tokenizer(default_model("int4"))
    draw = random.Random(0)
    for _ in range(20):
        ids = [draw.randrange(tokenizer.vocab_size) for _ in range(12)]
        ids += tokenizer.encode(" it 's , a . 🎉日")
        text = tokenizer.decode(ids)
        for end in range(len(ids)):
            # A cut character shows as the replacement character, at the very end.
            assert text.startswith(tokenizer.decode(ids[:end]).rstrip("\ufffd"))


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "messages: got str"),
        ({"role": "user", "content": "x"}, "messages: got dict"),
        ([], "empty list"),
        (["hello"], r"messages\[0\]: got str"),
        ([{"content": "x"}], r"messages\[0\]: got role None"),
        ([CHAT[1], {"role": "robot", "content": "x"}], r"messages\[1\]: got role 'robot'"),
        ([{"role": ["user"], "content": "x"}], r"messages\[0\]: got role \['user'\]"),
        ([CHAT[1], {"role": "user"}], r"messages\[1\]: got content of NoneType"),
        ([{"role": "user", "content": b"x"}], r"messages\[0\]: got content of bytes"),
        ([{"role": "user", "content": "\ud800"}], r"messages\[0\]\.content: character 0"),
    ],
)
def test_malformed_messages_are_explained(tokenizer, messages, message):
    with pytest.raises(ConfigError, match=message):
        tokenizer.chat(messages)


@pytest.mark.parametrize("text", [None, 3, b"x", ["x"], "a\udfff"])
def test_bad_text(tokenizer, text):
    with pytest.raises(ConfigError, match="prompt"):
        tokenizer.encode(text)


def test_template_that_refuses_and_no_template(folder):
    backend = AutoTokenizer.from_pretrained(folder)
    backend.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ConfigError, match="roles must alternate"):
        Tokenizer(backend).chat(CHAT)
    backend.chat_template = None
    assert not Tokenizer(backend).has_chat_template
    with pytest.raises(ConfigError, match="no chat template"):
        Tokenizer(backend).chat(CHAT)


def test_template_cannot_reach_python(folder):
    backend = AutoTokenizer.from_pretrained(folder)
    backend.chat_template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ConfigError, match="unsafe"):
        Tokenizer(backend).chat(CHAT)


def test_eos_ids_come_from_the_generation_config(tmp_path):
    folder = tiny_checkpoint(tmp_path / "tiny", num_layers=1)
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    assert load_tokenizer(folder).eos_token_ids == (0, 2)


def test_folder_without_tokenizer(tmp_path):
    assert load_tokenizer(tiny_checkpoint(tmp_path / "t", num_layers=1, tokenizer=False)) is None


def test_damaged_tokenizer(tmp_path):
    folder = tiny_checkpoint(tmp_path / "tiny", num_layers=1)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_tokenizer(folder)


def test_default_model(default_model, default_gguf):
    tokenizer = load_tokenizer(default_model("int4"))
    reference = AutoTokenizer.from_pretrained(default_model("float32"))
    template = open_gguf(default_gguf).fields["tokenizer.chat_template"].contents()
    assert reference.chat_template == template
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids) == (49152, (2,))
    ids = tokenizer.chat([{"role": "user", "content": "Hi"}])
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    # The model was trained with every digit split off first: the line breaks are one token.
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("a\n\n12")]
    assert pieces == ["a", "\n\n", "1", "2"]


def test_loading_and_encoding_are_silent(folder):
    code = (
        "import sys; from hybrid.models.tokenizer import load_tokenizer;"
        "t = load_tokenizer(sys.argv[1]); t.decode(t.encode('word ' * 5000));"
        "t.chat([{'role': 'user', 'content': 'x'}])"
    )
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")
