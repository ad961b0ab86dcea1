"""``hybrid chat``: a conversation in the terminal. The work is in hybrid/tui."""

from __future__ import annotations

from typing import Annotated

import typer

from hybrid.cli import options
from hybrid.cli.options import ModelOptions, SamplingOptions
from hybrid.errors import ConfigError

EXAMPLES = """Examples:

  hybrid chat

  hybrid chat --temperature 0.7 --system "Answer in one sentence."

  printf 'Hello\\nAnd in French?\\n' | hybrid chat
"""


@options.flatten
def chat(
    model: ModelOptions,
    sampling: SamplingOptions,
    strategy: Annotated[
        str, typer.Option(help="How tokens are produced; see hybrid list.")
    ] = "speculative",
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
) -> None:
    """Chat in the terminal. With piped input each line is a message and the output is plain."""
    params = sampling.to_params()
    decoder = options.load_decoder(model)
    if decoder.tokenizer is None or not decoder.tokenizer.has_chat_template:
        raise ConfigError(
            f"{decoder.model_name} has no chat template, which a chat needs. "
            "hybrid generate --raw continues a text."
        )

    from rich.text import Text

    from hybrid.tui.app import ChatApp, terminal
    from hybrid.tui.render import glyphs_for
    from hybrid.tui.session import ChatSession

    screen, reader = terminal()
    session = ChatSession(
        decoder.strategies, strategy, params, system, marks=glyphs_for(screen.console)
    )
    if reader.is_interactive:
        screen.show(Text(f"{decoder.model_name}, {strategy}. /help lists the commands.", "dim"))
    raise typer.Exit(ChatApp(decoder, session, screen, reader).run())
