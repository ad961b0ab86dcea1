"""What a prompt may be (text, chat messages, token ids), and how it becomes token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hybrid.errors import ConfigError

_KINDS = "a string, a list of chat messages or a list of token ids"


class PromptEncoder(Protocol):
    """What this module needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a raw prompt."""
        ...

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of a conversation, ready for the answer."""
        ...


def is_batch(prompt: Any) -> bool:
    """Whether `prompt` is a list of prompts rather than one.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(prompt, str):
        return False
    if not isinstance(prompt, (list, tuple)):
        raise ConfigError(f"prompt: got {type(prompt).__name__}, expected {_KINDS}, or several.")
    if not prompt:
        raise ConfigError(f"prompt: got an empty list, expected {_KINDS}.")
    return isinstance(prompt[0], (str, list, tuple))


def to_token_ids(
    prompt: Any, tokenizer: PromptEncoder | None, vocab_size: int, where: str = "prompt"
) -> list[int]:
    """Return the ids of one prompt.

    Args:
        prompt: a string (raw), chat messages, or ids.
        tokenizer: None when the checkpoint has none.
        vocab_size: ids must be below it.
        where: how errors name the prompt.

    Raises:
        ConfigError: empty, malformed, out of range, or text without a tokenizer.
    """
    is_ids = isinstance(prompt, (list, tuple)) and all(
        isinstance(item, int) and not isinstance(item, bool) for item in prompt
    )
    if is_ids:
        ids = list(prompt)
    elif isinstance(prompt, str) or (
        isinstance(prompt, (list, tuple)) and isinstance(prompt[0], Mapping)
    ):
        if tokenizer is None:
            raise ConfigError(f"{where}: this model has no tokenizer, expected token ids.")
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.chat(prompt)
    else:
        kind = type(prompt).__name__
        if isinstance(prompt, (list, tuple)):
            kind += f" holding {', '.join(sorted({type(item).__name__ for item in prompt}))}"
        raise ConfigError(f"{where}: got a {kind}, expected {_KINDS}.")
    if not ids:
        raise ConfigError(f"{where}: got an empty prompt, expected at least one token.")
    bad = next((token for token in ids if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise ConfigError(f"{where}: got token id {bad}, expected ids from 0 to {vocab_size - 1}.")
    return ids
