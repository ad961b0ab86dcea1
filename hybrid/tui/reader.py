"""Where a chat reads its lines: an editor with history, or a plain stream. Next: app.py."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

from hybrid.config import state_dir

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent


class Reader(Protocol):
    """Input of the chat."""

    is_interactive: bool

    def read(self) -> str:
        """Return the next message.

        Raises:
            EOFError: there is no more.
            KeyboardInterrupt: Ctrl-C.
        """
        ...


class LineReader:
    """One message per line; with a `prompt` when a person types into a dumb terminal."""

    def __init__(self, stream: TextIO | None = None, prompt: str = "") -> None:
        """Read from `stream`, stdin by default."""
        self._stream = stream or sys.stdin
        self._prompt = prompt
        self.is_interactive = bool(prompt)

    def read(self) -> str:
        """Return the next line."""
        if self._prompt:
            sys.stdout.write(self._prompt)
            sys.stdout.flush()
        line = self._stream.readline()
        if not line:
            raise EOFError
        return line


class EditorReader:
    """Multi-line editing and history (prompt_toolkit). Enter sends, Alt-Enter begins a line."""

    is_interactive = True

    def __init__(self, commands: Iterable[str] = ()) -> None:
        """Complete the names of `commands` on Tab."""
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter

        self._session: PromptSession[str] = PromptSession(
            message="> ",
            multiline=True,
            prompt_continuation="  ",
            key_bindings=_key_bindings(),
            history=_history(state_dir() / "chat_history"),
            completer=WordCompleter([f"/{name}" for name in commands], sentence=True),
            complete_while_typing=False,
        )

    def read(self) -> str:
        """Let the user edit a message."""
        return self._session.prompt()


def _key_bindings() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    keys.add("enter")(send)
    keys.add("escape", "enter")(begin_line)
    return keys


def _history(path: Path) -> History:
    """Return the history file, readable by the user alone; memory where it cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class LenientHistory(FileHistory):
        """A full disk costs the history, not the conversation."""

        def store_string(self, string: str) -> None:
            with suppress(OSError):
                super().store_string(string)

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        with path.open("ab"):
            return LenientHistory(path)
    except OSError:
        return InMemoryHistory()
