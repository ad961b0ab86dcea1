"""Which token id stands for a masked position. Next: hybrid/training/joint/recipe.py."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from hybrid.errors import ConfigError
from hybrid.models.checkpoint import read_json
from hybrid.models.tokenizer import Tokenizer


class Vocabulary(NamedTuple):
    """What the choice looks at: where the model lies, its tokenizer, its ids."""

    path: Path
    tokenizer: Tokenizer | None
    vocab_size: int
    eos_token_ids: tuple[int, ...]


def choose_mask_token(model: Vocabulary, given: int | None, used: Collection[int]) -> int:
    """Return the mask token: what the user gave, else the first that there is of these.

    1. `mask_token_id` of the model's config, as a hybrid checkpoint has it;
    2. the tokenizer's mask token;
    3. a row of the embedding that the tokenizer does not use;
    4. the last special token that neither ends, begins nor pads a text, nor occurs in the data.

    Args:
        model: whose token it is.
        given: the user's choice.
        used: ids that occur in the data. A token that is also the mask could not be learned.

    Raises:
        ConfigError: the user's choice ends an answer, occurs in the data or is no id of the model,
            or nothing was given and there is nothing to choose from.
    """
    if given is not None:
        _check(model, given, used)
        return given
    candidates = _candidates(model)
    taken = {*used, *model.eos_token_ids}
    for token in candidates:
        if token not in taken and token < model.vocab_size:
            return token
    raise ConfigError(
        "mask_token_id: the model has no mask token and no special token that the data leave free. "
        "Give the id of a token that never occurs in a text."
    )


def _check(model: Vocabulary, given: int, used: Collection[int]) -> None:
    if not 0 <= given < model.vocab_size:
        reason = f"an id from 0 to {model.vocab_size - 1}"
    elif given in model.eos_token_ids:
        reason = "one that does not end an answer"
    elif given in used:
        reason = "one that does not occur in the data"
    else:
        return
    raise ConfigError(f"mask_token_id: got {given}, expected {reason}.")


def _candidates(model: Vocabulary) -> list[int]:
    known = read_json(model.path / "config.json").get("mask_token_id")
    found = [] if known is None else [known]
    if model.tokenizer is None:
        return found
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        str(model.path), local_files_only=True, trust_remote_code=False
    )
    if tokenizer.mask_token_id is not None:
        found.append(tokenizer.mask_token_id)
    found.append(max(tokenizer.get_vocab().values(), default=-1) + 1)  # ids may have gaps
    added = tokenizer.added_tokens_decoder.items()
    special = {token for token, content in added if content.special}
    busy = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
    return [*found, *sorted(special - busy - {tokenizer.unk_token_id}, reverse=True)]
