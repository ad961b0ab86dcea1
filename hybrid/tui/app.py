"""The chat loop: read a line, run a command or stream an answer, repeat.

Rendering is in render.py and screen.py, the conversation in session.py. Next: hybrid/decoder.py.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from rich.console import Console
from rich.text import Text

from hybrid.errors import CapacityError, HybridError
from hybrid.tui.reader import EditorReader, LineReader, Reader
from hybrid.tui.screen import LiveScreen, PlainScreen, Screen
from hybrid.tui.session import COMMANDS, ChatSession
from hybrid.tui.turn import Turn


def terminal() -> tuple[Screen, Reader]:
    """Return the screen and reader that suit stdin and stdout.

    The live screen needs a terminal on both sides that understands control codes. Otherwise
    everything is plain text; only a person at a dumb terminal sees a prompt.
    """
    is_tty = sys.stdin.isatty() and sys.stdout.isatty()
    if is_tty and not Console().is_dumb_terminal:
        return LiveScreen(), EditorReader(COMMANDS)
    return PlainScreen(), LineReader(prompt="> " if is_tty else "")


class ChatApp:
    """Runs a chat: a `HybridDecoder`, a session, a screen for output, a reader for input."""

    def __init__(self, decoder: Any, session: ChatSession, screen: Screen, reader: Reader) -> None:
        """Start nothing yet: see `run`."""
        self._decoder = decoder
        self._session = session
        self._screen = screen
        self._reader = reader
        self._num_failures = 0

    def run(self) -> int:
        """Chat until the end of the input. Returns the exit code: 1 when a piped line failed."""
        was_interrupted = False
        while True:
            try:
                line = self._reader.read().strip()
            except EOFError:
                break
            except KeyboardInterrupt:
                if not self._reader.is_interactive:
                    raise
                if was_interrupted:
                    break
                was_interrupted = True
                self._screen.show(Text("(Ctrl-C again or Ctrl-D quits)", "dim"))
                continue
            was_interrupted = False
            if line and not self._handle(line):
                break
        return 1 if self._num_failures and not self._reader.is_interactive else 0

    def _handle(self, line: str) -> bool:
        """Run one line. Returns whether to go on; an error is shown and the chat goes on."""
        try:
            if line.startswith("/") and not line.startswith("//"):
                reply = self._session.execute(line)
                if reply.is_quit:
                    return False
                self._screen.show(reply.content)
            else:
                self._answer(line.removeprefix("/") if line.startswith("//") else line)
        except HybridError as error:
            self._num_failures += 1
            advice = " /reset empties the conversation." if isinstance(error, CapacityError) else ""
            self._screen.error(f"{error}{advice}")
        return True

    def _answer(self, text: str) -> None:
        """Stream one answer; Ctrl-C ends it and keeps what came."""
        session, decoder = self._session, self._decoder
        messages = session.prompt_for(text)
        num_prompt_tokens = len(decoder.tokenizer.chat(messages))
        turn = Turn(
            session.strategy.name,
            decoder.backbone.max_seq_len,
            num_prompt_tokens,
            decoder.tokenizer.decode,
        )
        sampling = session.sampling_for(turn)
        try:
            with (
                _stop_on_interrupt(self._reader) as is_stopped,
                self._screen.answer(turn) as update,
                closing(
                    decoder.stream(
                        messages,
                        sampling,
                        strategy=session.strategy,
                        allow_unverified=session.allow_unverified,
                    )
                ) as events,
            ):
                for event in events:
                    turn.add(event)
                    update(event)
                    if is_stopped():
                        break
        except KeyboardInterrupt:
            if not self._reader.is_interactive:
                raise
        finally:
            is_kept = session.finish(text, turn)
        if not is_kept:
            self._screen.show(Text("(no answer; the message was not kept)", "dim"))


@contextmanager
def _stop_on_interrupt(reader: Reader) -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a flag that is read between steps; the second one raises.

    An exception at a random place could fall between two halves of a screen update. When the
    input is piped Ctrl-C keeps its usual meaning: leave.
    """
    num_interrupts = 0

    def handle(signum: int, frame: Any) -> None:
        nonlocal num_interrupts
        num_interrupts += 1
        if num_interrupts > 1:
            raise KeyboardInterrupt

    if not reader.is_interactive:
        yield lambda: False
        return
    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: num_interrupts > 0
    finally:
        signal.signal(signal.SIGINT, previous)
