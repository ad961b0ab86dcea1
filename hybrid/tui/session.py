"""`ChatSession`: the state of a chat and its commands. Prints nothing, reads no terminal.

Next: hybrid/tui/app.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from hybrid.config import parse_setting, spell_settings
from hybrid.errors import ConfigError, did_you_mean
from hybrid.params import SamplingParams
from hybrid.strategy import Strategy
from hybrid.tui import conversation, render
from hybrid.tui.conversation import Conversation, Message
from hybrid.tui.turn import Turn


@dataclass(frozen=True)
class Reply:
    """What a command has to show."""

    content: RenderableType
    is_quit: bool = False


class ChatSession:
    """The conversation, the settings that commands change, and the last answer."""

    def __init__(
        self,
        decoder: Any,
        strategy: Strategy,
        sampling: SamplingParams | None = None,
        system: str | None = None,
        *,
        allow_unverified: bool = False,
        marks: render.Glyphs | None = None,
    ) -> None:
        """Begin an empty conversation.

        Args:
            decoder: a `HybridDecoder`; it says which strategies there are.
            strategy: the one to begin with, one that the decoder can do.
            sampling: parameters of every answer.
            system: system prompt, or None.
            allow_unverified: see `HybridDecoder.generate`.
            marks: marks of the strip, for the legend.
        """
        self._decoder = decoder
        self.strategy, self.allow_unverified = strategy, allow_unverified
        self.sampling = sampling or SamplingParams()
        self.conversation = Conversation(system)
        self.last: Turn | None = None
        self.marks = marks

    @property
    def strategy_text(self) -> str:
        """Name of the strategy and the parameters that were given, as `/strategy` takes them."""
        given = self.strategy.settings.model_dump(mode="json", exclude_unset=True)
        return f"{self.strategy.name} {spell_settings(given)}".rstrip()

    def prompt_for(self, text: str) -> list[dict[str, str]]:
        """Return the chat with `text` as its newest message. Nothing is kept yet."""
        return [*self.conversation.to_prompt(), {"role": "user", "content": text}]

    def sampling_for(self, turn: Turn) -> SamplingParams:
        """Return the parameters with `max_new_tokens` cut to what the context still holds.

        A prompt that fills the context is left for the decoder to refuse.
        """
        room = turn.max_seq_len - turn.num_prompt_tokens
        if 0 < room < self.sampling.max_new_tokens:
            cut: SamplingParams = self.sampling.replace(max_new_tokens=room)
            return cut
        return self.sampling

    def finish(self, text: str, turn: Turn) -> bool:
        """Keep the exchange, unless the answer is empty. Returns whether it was kept.

        Chat templates want user and assistant to alternate, so both are kept or neither.
        """
        if turn.steps:
            self.last = turn
        if not turn.text:
            return False
        self.conversation.messages += [
            Message("user", text),
            Message("assistant", turn.text, not turn.is_complete),
        ]
        return True

    def execute(self, line: str) -> Reply:
        """Run one ``/command argument`` line.

        Raises:
            ConfigError: unknown command or unusable argument.
        """
        name, _, argument = line[1:].partition(" ")
        command = COMMANDS.get(name.strip())
        if command is None:
            hint = did_you_mean(name, COMMANDS).replace("'", "").replace("mean ", "mean /")
            raise ConfigError(
                f"Unknown command /{name}.{hint} (// sends a message that begins with /)"
            )
        return command.run(self, argument.strip())

    def _set_strategy(self, name: str, *settings: str) -> None:
        given = dict(parse_setting(text, "/strategy") for text in settings)
        self.strategy = self._decoder.resolve_strategy(
            Strategy.preset(name, **given), allow_unverified=self.allow_unverified
        )


def _help(session: ChatSession, argument: str) -> Reply:
    table = Table.grid(padding=(0, 2))
    for name, command in COMMANDS.items():
        table.add_row(Text(f"/{name} {command.argument}".rstrip()), Text(command.help))
    table.add_row(Text("//text"), Text("send a message that begins with /"))
    table.add_row(Text("Alt-Enter"), Text("new line; Enter sends"))
    table.add_row(Text("Ctrl-C"), Text("stop the answer; twice at the prompt, or Ctrl-D: quit"))
    return Reply(table)


def _strategy(session: ChatSession, argument: str) -> Reply:
    if argument:
        session._set_strategy(*argument.split())
    others = ", ".join(session._decoder.strategies)
    return Reply(Text(f"strategy: {session.strategy_text} (of {others})"))


def _temperature(session: ChatSession, argument: str) -> Reply:
    if argument:
        try:
            value = float(argument)
        except ValueError:
            raise ConfigError(
                f"temperature: got {argument!r}, expected a number, for example /temperature 0.7."
            ) from None
        session.sampling = session.sampling.replace(temperature=value)
    kind = "greedy" if session.sampling.is_greedy else "sampled"
    return Reply(Text(f"temperature: {session.sampling.temperature:g} ({kind})"))


def _reset(session: ChatSession, argument: str) -> Reply:
    session.conversation = Conversation(session.conversation.system)
    session.last = None
    return Reply(Text("The conversation is empty again."))


def _system(session: ChatSession, argument: str) -> Reply:
    if argument:
        session.conversation.system = None if argument == "-" else argument
    return Reply(Text(f"system: {session.conversation.system or '(none)'}"))


def _save(session: ChatSession, argument: str) -> Reply:
    path = _path(argument, "/save")
    conversation.save(session.conversation, path)
    return Reply(Text(f"Saved {_count(session)} to {path}"))


def _load(session: ChatSession, argument: str) -> Reply:
    path = _path(argument, "/load")
    session.conversation = conversation.load(path)
    session.last = None
    return Reply(Text(f"Loaded {_count(session)} from {path}"))


def _count(session: ChatSession) -> str:
    num = len(session.conversation.messages)
    return f"{num} message{'' if num == 1 else 's'}"


def _path(argument: str, command: str) -> Path:
    if not argument:
        raise ConfigError(f"{command} needs a file, for example {command} chat.json.")
    try:
        return Path(argument).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{command}: {error}") from None


def _stats(session: ChatSession, argument: str) -> Reply:
    if session.last is None or not session.last.steps:
        return Reply(Text("No answer yet."))
    return Reply(render.stats_table(session.last.stats))


def _legend(session: ChatSession, argument: str) -> Reply:
    return Reply(render.legend(session.last, session.marks))


def _quit(session: ChatSession, argument: str) -> Reply:
    return Reply(Text(""), is_quit=True)


@dataclass(frozen=True)
class _Command:
    run: Callable[[ChatSession, str], Reply]
    argument: str
    help: str


COMMANDS: dict[str, _Command] = {
    "help": _Command(_help, "", "this list"),
    "strategy": _Command(
        _strategy, "[NAME [KEY=VALUE ...]]", "show or choose how tokens are produced"
    ),
    "temperature": _Command(_temperature, "[X]", "show or set the temperature; 0 is greedy"),
    "reset": _Command(_reset, "", "forget the conversation, keep the settings"),
    "system": _Command(_system, "[TEXT]", "show or set the system prompt; - removes it"),
    "save": _Command(_save, "FILE", "write the conversation as JSON"),
    "load": _Command(_load, "FILE", "read a conversation that /save wrote"),
    "stats": _Command(_stats, "", "numbers of the last answer"),
    "legend": _Command(_legend, "", "what the colours mean, on the last answer"),
    "quit": _Command(_quit, "", "leave"),
}
