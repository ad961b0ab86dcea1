"""The messages of a chat and their JSON file. Next: hybrid/tui/session.py."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hybrid.errors import ConfigError

_ROLES = ("user", "assistant")
_FORMAT = "hybrid-chat"


@dataclass(frozen=True)
class Message:
    """One message. `is_interrupted` marks an answer that was stopped before its end."""

    role: str
    content: str
    is_interrupted: bool = False


@dataclass
class Conversation:
    """A system prompt and the exchanged messages."""

    system: str | None = None
    messages: list[Message] = field(default_factory=list)

    def to_prompt(self) -> list[dict[str, str]]:
        """Return the chat as the decoder takes it."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + [{"role": m.role, "content": m.content} for m in self.messages]


def save(conversation: Conversation, path: Path) -> None:
    """Write the conversation as JSON. A crash leaves the old file or the new one, never half.

    Raises:
        ConfigError: the file cannot be written.
    """
    document = {"format": _FORMAT, "version": 1, **asdict(conversation)}
    temporary = None
    try:
        # Follow a link: replacing the link itself would leave its target behind.
        path = path.resolve()
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a directory")
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=2)
            file.write("\n")
        Path(temporary).replace(path)
    except (OSError, RuntimeError, ValueError) as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise ConfigError(f"Cannot save the conversation: {error}") from error


def load(path: Path) -> Conversation:
    """Read a conversation that `save` wrote.

    Raises:
        ConfigError: the file cannot be read or is not a conversation.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"Cannot load {str(path)!r}: {error}") from error
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise ConfigError(f"{str(path)!r} is not a conversation written by /save.")
    system, messages = document.get("system"), document.get("messages")
    if not isinstance(messages, list) or not isinstance(system, str | None):
        raise ConfigError(
            f"{str(path)!r}: 'messages' must be a list and 'system' a string or null."
        )
    if system is not None:
        system = system.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair
    return Conversation(system, [_message(item, path, i) for i, item in enumerate(messages)])


def _message(item: Any, path: Path, index: int) -> Message:
    if (
        not isinstance(item, dict)
        or item.get("role") not in _ROLES
        or not isinstance(item.get("content"), str)
    ):
        raise ConfigError(
            f"{str(path)!r}: message {index} must have a role (user or assistant) "
            "and a content string."
        )
    # JSON can spell half a surrogate pair, which no tokenizer takes.
    content = item["content"].encode("utf-8", "replace").decode("utf-8")
    return Message(item["role"], content, bool(item.get("is_interrupted", False)))
