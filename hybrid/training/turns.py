"""Where a model's chat template puts the user's turn, and how an answer ends in ids.

Next: hybrid/training/data.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from os.path import commonprefix

from hybrid.errors import ConfigError
from hybrid.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class UserTurn:
    """The ids around what a user says first.

    Attributes:
        start: everything before it, a default system prompt included.
        end: everything behind it, up to where the answer begins.
    """

    start: tuple[int, ...]
    end: tuple[int, ...]


def user_turn(tokenizer: Tokenizer) -> UserTurn:
    """Find the turn by rendering the template with two messages and keeping what does not differ.

    Raises:
        ConfigError: no chat template, or one in which the message or the end of its turn is lost.
    """
    one, two = (tokenizer.chat([{"role": "user", "content": text}]) for text in ("a", "b"))
    turn = UserTurn(
        tuple(commonprefix([one, two])), tuple(commonprefix([one[::-1], two[::-1]])[::-1])
    )
    if not turn.end or one == two:
        raise ConfigError(
            "The model's chat template does not mark where the user's turn ends: prompts cannot be "
            "told from answers. Give prompts of your own."
        )
    return turn


def answer_ids(text: str, tokenizer: Tokenizer, *, is_complete: bool) -> list[int]:
    """Return the ids of an answer as the target would have generated it.

    Args:
        text: the answer.
        tokenizer: of the target.
        is_complete: end it with the EOS id, which a target that was not cut would have generated.
    """
    ids = tokenizer.encode(text)
    # What the tokenizer puts before any text, as BOS, stands in the prompt already.
    before = takewhile(
        lambda pair: pair[0] == pair[1], zip(ids, tokenizer.encode(""), strict=False)
    )
    ids = ids[sum(1 for _ in before) :]
    end = _answer_end(tokenizer) if is_complete else None
    if end is None or (ids and ids[-1] in tokenizer.eos_token_ids):
        return ids
    return [*ids, end]


def _answer_end(tokenizer: Tokenizer) -> int | None:
    """Return the EOS id that ends an assistant's turn; of several it is what ends a user's."""
    eos = tokenizer.eos_token_ids
    if len(eos) > 1 and tokenizer.has_chat_template:
        end = user_turn(tokenizer).end[0]
        if end in eos:
            return end
    return eos[0] if eos else None
