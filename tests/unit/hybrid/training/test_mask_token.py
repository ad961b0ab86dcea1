from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from hybrid.errors import ConfigError
from hybrid.models.tiny import tiny_checkpoint
from hybrid.training.mask_token import Vocabulary, choose_mask_token
from hybrid.training.trainable import Trainable, load_trainable


def _load(path: Path, **fields: object) -> Trainable:
    return load_trainable(tiny_checkpoint(path, num_layers=1, hidden_size=16, **fields))


def _ids(model: Trainable) -> Vocabulary:
    return Vocabulary(model.path, model.tokenizer, model.vocab_size, model.eos_token_ids)


def test_the_users_choice_comes_first(tmp_path: Path) -> None:
    trainable = _load(tmp_path, mask_token_id=5)
    assert choose_mask_token(_ids(trainable), 9, {7}) == 9
    assert choose_mask_token(_ids(trainable), None, {7}) == 5


@pytest.mark.parametrize(
    ("given", "message"),
    [(2, "does not end an answer"), (7, "does not occur"), (999, "an id from 0 to 258")],
)
def test_bad_choices_are_refused(tmp_path: Path, given: int, message: str) -> None:
    with pytest.raises(ConfigError, match=f"mask_token_id: got {given}, expected .*{message}"):
        choose_mask_token(_ids(_load(tmp_path)), given, {7})


def test_the_tokenizers_mask_token_comes_before_a_spare_row(tmp_path: Path) -> None:
    trainable = _load(tmp_path, vocab_size=300)
    assert choose_mask_token(_ids(trainable), None, set()) == 259  # the first that no token has
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
    tokenizer.add_tokens(["more"])
    tokenizer.save_pretrained(tmp_path)
    assert choose_mask_token(_ids(trainable), None, set()) == 259  # now <|mask|>
    assert choose_mask_token(_ids(trainable), None, {259}) == 261


def test_a_row_behind_a_gap_is_not_free(tmp_path: Path) -> None:
    trainable = _load(tmp_path, vocab_size=300)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    last = max(vocab, key=vocab.get)
    vocab[last] = 259  # no longer 258: there are 259 tokens, and 259 is one of them
    path.write_text(json.dumps(content))
    assert AutoTokenizer.from_pretrained(tmp_path).convert_ids_to_tokens(259) == last
    assert choose_mask_token(_ids(trainable), None, set()) == 260


def test_a_free_special_token_is_the_last_resort(tmp_path: Path) -> None:
    trainable = _load(tmp_path)  # 0 pads, 2 ends an answer
    assert choose_mask_token(_ids(trainable), None, {5}) == 1
    with pytest.raises(ConfigError, match="Give the id of a token that never occurs"):
        choose_mask_token(_ids(trainable), None, {1, 5})


def test_without_a_tokenizer_it_must_be_given(tmp_path: Path) -> None:
    trainable = _load(tmp_path, tokenizer=False)
    with pytest.raises(ConfigError, match="no mask token"):
        choose_mask_token(_ids(trainable), None, set())
    assert json.loads((tmp_path / "config.json").read_text()).get("mask_token_id") is None
    assert choose_mask_token(_ids(trainable), 3, set()) == 3
