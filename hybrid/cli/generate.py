"""``hybrid generate``: one answer. stdout holds the answer alone, everything else is on stderr."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybrid.cli import options
from hybrid.cli.options import ModelOptions, SamplingOptions, StrategyOptions
from hybrid.config import spell_settings
from hybrid.errors import ConfigError

if TYPE_CHECKING:
    from hybrid.decoder import HybridDecoder
    from hybrid.params import SamplingParams
    from hybrid.strategy import Strategy
    from hybrid.types import GenerationResult

EXAMPLES = """Examples:

  hybrid generate "Why is the sky blue?"

  hybrid generate "Once upon a time" --raw --temperature 0.8 --seed 1

  cat notes.txt | hybrid generate - --system "Summarise in three points."

  hybrid generate "Hello" --json --logprobs 3

  hybrid generate "Hello" --strategy hybrid --record run.jsonl

  hybrid generate "Hello" --model LLADA --strategy fast-dllm --set threshold=0.8 --stats
"""


@options.flatten
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.")],
    model: ModelOptions,
    strategy: StrategyOptions,
    sampling: SamplingOptions,
    system: Annotated[str | None, typer.Option(help="System prompt of a chat.")] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Send the prompt as a chat message or as it is. "
            "Default: chat when the model has a chat template.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Statistics table, on stderr.")] = False,
    record: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Keep the run of strategy hybrid for hybrid explain."),
    ] = None,
) -> None:
    """Generate one answer and stream it to stdout."""
    if system is not None and chat is False:
        raise typer.BadParameter("--system needs a chat; leave out --raw.")
    params = sampling.to_params()
    strategy.preset()  # a wrong name is refused before anything is loaded
    text = options.read_text(prompt)
    if not text.strip():
        raise ConfigError("prompt: got an empty prompt, expected text. Give it, or pipe it to -.")
    decoder = options.load_decoder(model)
    is_chat = chat
    if is_chat is None:
        tokenizer = decoder.tokenizer
        is_chat = system is not None or (tokenizer is not None and tokenizer.has_chat_template)
    request = _messages(text, system) if is_chat else text
    chosen = strategy.resolve(decoder)
    how: dict[str, Any] = {
        "strategy": chosen,
        "record": record,
        "allow_unverified": strategy.allow_unverified,
    }
    if as_json:
        result = decoder.generate(request, params, **how)
        typer.echo(json.dumps({**_about(decoder, chosen), **result.to_dict()}))
    else:
        result = _stream(decoder, request, params, how)
    if stats and result:
        _print_stats(result, _about(decoder, chosen))


def _about(decoder: HybridDecoder, strategy: Strategy) -> dict[str, Any]:
    """Return what decoded; what denoises has neither drafter nor verifier."""
    from hybrid.strategy import VerifiedPreset

    settings, drafter, verifier = strategy.settings, None, None
    if isinstance(settings, VerifiedPreset):
        drafter, verifier = settings.drafter or decoder.drafter_name, decoder.verifier_name
    return {
        "model": decoder.model_name,
        "strategy": strategy.name,
        "parameters": settings.model_dump(mode="json"),
        "drafter": drafter,
        "verifier": verifier,
    }


def _messages(text: str, system: str | None) -> list[dict[str, str]]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": text}]


def _stream(
    decoder: HybridDecoder, request: Any, params: SamplingParams, how: dict[str, Any]
) -> GenerationResult | None:
    """Write the answer as it comes; a terminal gets no raw control characters."""
    from hybrid.tui.text import clean

    is_tty = sys.stdout.isatty()
    result: GenerationResult | None = None
    last = "\n"
    try:
        with closing(decoder.stream(request, params, **how)) as events:
            for event in events:
                last = event.text[-1:] or last
                sys.stdout.write(clean(event.text) if is_tty else event.text)
                sys.stdout.flush()
                result = event.result
    finally:
        # The prompt of the shell must not follow the answer on its line, also after Ctrl-C.
        if last != "\n":
            sys.stdout.write("\n")
            sys.stdout.flush()
    return result


def _print_stats(result: GenerationResult, about: dict[str, Any]) -> None:
    from rich.console import Console

    from hybrid.tui.render import stats_table

    console = Console(stderr=True, highlight=False, markup=False)
    given = {name: value for name, value in about["parameters"].items() if value is not None}
    about = {**about, "parameters": spell_settings(given)}
    console.print(", ".join(f"{name} {value}" for name, value in about.items() if value))
    console.print(stats_table(result.stats))
