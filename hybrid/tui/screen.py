"""Where a chat shows itself: a live terminal, or plain text. Next: hybrid/tui/app.py."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from typing import Protocol, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from hybrid.tui import render
from hybrid.tui.text import clean
from hybrid.tui.turn import Turn
from hybrid.types import StreamEvent

Update = Callable[[StreamEvent], None]


class Screen(Protocol):
    """Output of the chat. Text that it is given may hold anything; what it writes is clean."""

    console: Console

    def show(self, content: RenderableType) -> None:
        """Print the reply of a command."""
        ...

    def error(self, message: str) -> None:
        """Print a one-line error."""
        ...

    def answer(self, turn: Turn) -> AbstractContextManager[Update]:
        """Show `turn` while it grows: call the result after each event. Leaving it is the end."""
        ...


class LiveScreen:
    """Redraws the current answer in place, then prints its final form into the scrollback."""

    _MIN_INTERVAL = 0.06

    def __init__(self, console: Console | None = None) -> None:
        """Draw on `console`, the terminal by default."""
        self.console = console or Console(highlight=False, theme=render.THEME)

    def show(self, content: RenderableType) -> None:
        """Print the reply of a command."""
        self.console.print(_cleaned(content))

    def error(self, message: str) -> None:
        """Print a one-line error in the output, beside the answers."""
        self.console.print(Text.assemble(("Error: ", "bold red"), clean(_one_line(message))))

    @contextmanager
    def answer(self, turn: Turn) -> Iterator[Update]:
        """Draw at most ~16 frames a second, and never spend over a tenth of the time on it."""
        live = Live(
            render.live_frame(turn, self.console),
            console=self.console,
            auto_refresh=False,
            transient=True,
        )
        due = 0.0

        def update(event: StreamEvent) -> None:
            nonlocal due
            begin = time.monotonic()
            if begin >= due:
                live.update(render.live_frame(turn, self.console), refresh=True)
                end = time.monotonic()
                due = end + max(self._MIN_INTERVAL, 10 * (end - begin))

        try:
            with _no_echo(), live:
                yield update
                live.update(Text(""))
        finally:
            if turn.steps:
                self.console.print(render.finished(turn, self.console))
                self.console.print()


class PlainScreen:
    """Plain text without a single control code: pipes, files and dumb terminals."""

    def __init__(self, stdout: TextIO | None = None, stderr: TextIO | None = None) -> None:
        """Write answers and replies to `stdout`, errors to `stderr`."""
        self._stdout, self._stderr = stdout or sys.stdout, stderr or sys.stderr
        self.console = Console(
            file=self._stdout, color_system=None, force_terminal=False, highlight=False
        )

    def show(self, content: RenderableType) -> None:
        """Print the reply of a command."""
        self.console.print(_cleaned(content), soft_wrap=isinstance(content, Text))
        self._stdout.flush()

    def error(self, message: str) -> None:
        """Print a one-line error to stderr."""
        self._stderr.write(f"Error: {clean(_one_line(message))}\n")
        self._stderr.flush()

    @contextmanager
    def answer(self, turn: Turn) -> Iterator[Update]:
        """Write the text as it comes."""

        def update(event: StreamEvent) -> None:
            self._stdout.write(clean(event.text))
            self._stdout.flush()

        try:
            yield update
        finally:
            if turn.steps:
                self._stdout.write("\n" if turn.is_complete else " [stopped]\n")
                self._stdout.flush()


@contextmanager
def _no_echo() -> Iterator[None]:
    """Keep what the user types ahead out of the region that is being redrawn."""
    if not sys.stdin.isatty() or find_spec("termios") is None:
        yield
        return
    import termios

    before = termios.tcgetattr(sys.stdin)
    silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def _one_line(message: str) -> str:
    return " ".join(message.split())


def _cleaned(content: RenderableType) -> RenderableType:
    return Text(clean(content.plain), content.style) if isinstance(content, Text) else content
