"""What a prompt may be."""

from __future__ import annotations

import pytest
import torch
from fakes import BYTES

from hybrid.errors import ConfigError
from hybrid.prompts import is_batch, to_token_ids

CHAT = [{"role": "user", "content": "hi"}]


def ids_of(prompt, tokenizer=BYTES, vocab_size=300):
    return to_token_ids(prompt, tokenizer, vocab_size)


@pytest.mark.parametrize("prompt", ["text", "", [1, 2], (1, 2), CHAT, [True]])
def test_one_prompt(prompt):
    assert not is_batch(prompt)


@pytest.mark.parametrize("prompt", [["a"], ["a", CHAT], [[1]], [CHAT], [[]], ([1], "a"), [(1,)]])
def test_several_prompts(prompt):
    assert is_batch(prompt)


def test_the_three_kinds():
    assert ids_of("hi") == BYTES.encode("hi")
    assert ids_of([5, 0, 299]) == ids_of((5, 0, 299)) == [5, 0, 299]
    assert ids_of(CHAT) == BYTES.chat(CHAT)
    assert ids_of(tuple(CHAT)) == BYTES.chat(CHAT)


def test_ids_are_copied():
    mine = [1, 2]
    ids_of(mine).append(3)
    assert mine == [1, 2]


@pytest.mark.parametrize("prompt", [None, 5, b"bytes", {"role": "user"}, torch.tensor([1]), {1, 2}])
def test_other_types_are_refused(prompt):
    name = type(prompt).__name__
    with pytest.raises(ConfigError, match=f"prompt: got {name}, expected a string, a list of chat"):
        is_batch(prompt)


def test_an_empty_list_is_refused():
    with pytest.raises(ConfigError, match="prompt: got an empty list, expected a string"):
        is_batch([])


@pytest.mark.parametrize("prompt", ["", []])
def test_empty_prompts_are_refused(prompt):
    with pytest.raises(
        ConfigError, match="prompt: got an empty prompt, expected at least one token"
    ):
        ids_of(prompt)


@pytest.mark.parametrize("bad", [-1, 300, 10**12])
def test_ids_must_be_in_the_vocabulary(bad):
    with pytest.raises(
        ConfigError, match=f"prompt: got token id {bad}, expected ids from 0 to 299"
    ):
        ids_of([1, bad])


@pytest.mark.parametrize(
    ("prompt", "held"),
    [
        ([1, "a"], "int, str"),
        ([1.0, 2.0], "float"),
        ([True, False], "bool"),
        ([[1]], "list"),
        ([None], "NoneType"),
    ],
)
def test_mixtures_are_refused(prompt, held):
    with pytest.raises(ConfigError, match=f"prompt: got a list holding {held}, expected a string"):
        ids_of(prompt)


@pytest.mark.parametrize("prompt", ["text", CHAT])
def test_text_needs_a_tokenizer(prompt):
    with pytest.raises(ConfigError, match="no tokenizer, expected token ids"):
        ids_of(prompt, tokenizer=None)
    assert ids_of([1], tokenizer=None) == [1]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "robot", "content": "x"}, "messages.0.: got role 'robot'"),
        ({"content": "x"}, "messages.0.: got role None"),
        ({"role": "user"}, "got content of NoneType"),
        ({"role": "user", "content": 3}, "got content of int"),
        ({}, "got role None"),
    ],
)
def test_malformed_messages_are_refused(message, said):
    with pytest.raises(ConfigError, match=said):
        ids_of([message])


def test_a_chat_with_something_else_in_it_is_refused():
    with pytest.raises(ConfigError, match="messages.1.: got str"):
        ids_of([*CHAT, "and then"])


def test_the_prompt_is_named():
    with pytest.raises(ConfigError, match="prompt 3: got token id -1"):
        to_token_ids([-1], BYTES, 300, "prompt 3")
