"""Text to token ids and back, through the tokenizer that the checkpoint brings.

Code in a checkpoint is never run; chat templates are rendered in transformers' sandbox.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybrid.errors import CheckpointError, ConfigError
from hybrid.models.checkpoint import eos_token_ids, read_json

ROLES = ("system", "user", "assistant", "tool")

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


class Tokenizer:
    """The tokenizer of one model.

    Attributes:
        eos_token_ids: ids that end a generation, as transformers' `generate` would use them.
    """

    def __init__(self, backend: Any, eos_token_ids: tuple[int, ...] = ()) -> None:
        """Wrap `backend`, a transformers tokenizer."""
        self._backend = backend
        own = backend.eos_token_id
        self.eos_token_ids = eos_token_ids or (() if own is None else (own,))

    @property
    def backend(self) -> Any:
        """The transformers tokenizer, for libraries that ask for one."""
        return self._backend

    @property
    def vocab_size(self) -> int:
        """How many ids there are, added tokens included; the model's matrix may have more rows."""
        return len(self._backend)

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` works."""
        return self._backend.chat_template is not None

    def encode(self, text: str) -> list[int]:
        """Return the ids of a raw prompt, with the special tokens that the model itself adds.

        Raises:
            ConfigError: `text` is not a string of valid Unicode.
        """
        return _ids(self._backend(_checked(text, "prompt"), verbose=False))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`, spaces exactly as they are in the tokens.

        The text of a prefix of `ids`, up to a character that it cuts, is a prefix of the text.
        """
        text: str = self._backend.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of a conversation up to where the assistant's answer begins.

        Args:
            messages: [{"role": "system" | "user" | "assistant" | "tool", "content": str}, ...].

        Raises:
            ConfigError: a malformed message, no chat template, or one that refuses the messages.
        """
        if not self.has_chat_template:
            raise ConfigError(
                "This model has no chat template. Expected a plain string prompt, or the "
                "instruction-tuned variant of the model."
            )
        _check_messages(messages)
        try:
            encoded = self._backend.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
            )
        except Exception as error:  # a template is a program: it can fail in any way
            raise ConfigError(f"The model's chat template refuses the messages: {error}") from error
        return _ids(encoded)


def load_tokenizer(path: str | Path) -> Tokenizer | None:
    """Load the tokenizer of a local checkpoint; None where the folder has none.

    Raises:
        CheckpointError: it has one that cannot be read.
    """
    folder = Path(path)
    if not any((folder / name).is_file() for name in _FILES):
        return None
    from transformers import AutoTokenizer

    try:
        with _quiet():
            backend = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
    # transformers raises many kinds for files that are missing, damaged or need code.
    except Exception as error:
        raise CheckpointError(
            f"The tokenizer in {folder} cannot be loaded: {error} Fetch the model again; a "
            "tokenizer that needs code from the checkpoint is not supported."
        ) from error
    configs = (folder / name for name in ("generation_config.json", "config.json"))
    return Tokenizer(backend, eos_token_ids(*(read_json(c) for c in configs if c.is_file())))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' advice about other people's checkpoints off the user's terminal."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _ids(encoded: Mapping[str, Any]) -> list[int]:
    return list(encoded["input_ids"])


def _checked(text: Any, where: str) -> str:
    if not isinstance(text, str):
        raise ConfigError(f"{where}: got {type(text).__name__}, expected a string.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{where}: character {error.start} is half of a surrogate pair. Expected valid "
            "Unicode: decode the input as UTF-8 with errors='replace'."
        ) from None
    return text


def _check_messages(messages: Any) -> None:
    expected = (
        'Expected a list of {"role": ' + " | ".join(f'"{r}"' for r in ROLES) + ', "content": str}.'
    )
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ConfigError(f"messages: got {type(messages).__name__}. {expected}")
    if not messages:
        raise ConfigError(f"messages: got an empty list. {expected}")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise ConfigError(f"{where}: got {type(message).__name__}. {expected}")
        if message.get("role") not in ROLES:
            raise ConfigError(f"{where}: got role {message.get('role')!r}. {expected}")
        content = message.get("content")
        if not isinstance(content, str):
            raise ConfigError(f"{where}: got content of {type(content).__name__}. {expected}")
        _checked(content, f"{where}.content")
