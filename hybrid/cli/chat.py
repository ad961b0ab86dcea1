"""``hybrid chat``: a conversation in the terminal. The work is in hybrid/tui."""

from __future__ import annotations

from typing import Annotated

import typer

from hybrid.cli import options
from hybrid.cli.options import ModelOptions, SamplingOptions, StrategyOptions
from hybrid.errors import ConfigError

EXAMPLES = """Examples:

  hybrid chat

  hybrid chat --temperature 0.7 --system "Answer in one sentence."

  hybrid chat --model LLADA --strategy d3llm --set entropy_threshold=0.45

  printf 'Hello\\nAnd in French?\\n' | hybrid chat
"""


@options.flatten
def chat(
    model: ModelOptions,
    strategy: StrategyOptions,
    sampling: SamplingOptions,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
) -> None:
    """Chat in the terminal. With piped input each line is a message and the output is plain."""
    params = sampling.to_params()
    strategy.preset()  # a wrong name is refused before anything is loaded
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
        decoder,
        strategy.resolve(decoder),
        params,
        system,
        allow_unverified=strategy.allow_unverified,
        marks=glyphs_for(screen.console),
    )
    if reader.is_interactive:
        about = f"{decoder.model_name}, {session.strategy_text}. /help lists the commands."
        screen.show(Text(about, "dim"))
    raise typer.Exit(ChatApp(decoder, session, screen, reader).run())
