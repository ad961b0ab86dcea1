"""``hybrid bench``: transformers and our strategies on the same prompts, taking turns.

stdout holds the tables and, on its last line, what was measured as one JSON document. ``hybrid
bench report`` fills the tables of a Markdown page from such lines, ``hybrid bench policies`` is in
bench_policies.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hybrid.cli import bench_policies, options
from hybrid.cli.bench_tables import publish
from hybrid.cli.options import ModelOptions
from hybrid.errors import ConfigError

if TYPE_CHECKING:
    from hybrid.bench.candidates import Candidate
    from hybrid.bench.prompts import Prompt
    from hybrid.decoder import HybridDecoder
    from hybrid.protocols import Backbone
    from hybrid.strategy import Strategy

EXAMPLES = """Examples:

  hybrid bench --limit 5

  hybrid bench --also-dtype float32 --out benchmarks/results/cpu.jsonl

  hybrid bench --strategies ar,hybrid --prompts questions.jsonl --no-transformers

  hybrid bench --strategies speculative --set block_size=6

  hybrid bench --widths 1,2,4,8,16

  hybrid bench policies

  hybrid bench report docs/results.md
"""

bench = typer.Typer(
    invoke_without_command=True,
    epilog=EXAMPLES,
    help="Measure speed, acceptance and equality. The ratio is the result; times vary.",
)


@dataclass(frozen=True)
class BenchOptions:
    """What to measure, on what, against whom."""

    strategies: Annotated[
        str | None,
        typer.Option(
            help="What to measure, separated by commas; see hybrid list presets. "
            "Default: ar,ngram,speculative where the model can verify, else what it is meant for."
        ),
    ] = None
    settings: options.Settings = field(default_factory=list)
    also_dtype: Annotated[
        str | None, typer.Option(help="Measure this precision in the same run too.")
    ] = None
    also_exact: Annotated[
        bool, typer.Option("--also-exact", help="Measure each precision with --exact too.")
    ] = False
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, help="Length limit of each answer.")
    ] = 128
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON lines (prompt, messages or p), or a text a line; default: 20."),
    ] = None
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first prompts.")] = None
    transformers: Annotated[
        bool | None,
        typer.Option(
            "--transformers/--no-transformers",
            help="Compare with its generate. Default: where the model can verify.",
        ),
    ] = None
    llama_cpp: Annotated[
        str | None,
        typer.Option(help="Compare with llama.cpp: a Python that has llama-cpp-python."),
    ] = None
    widths: Annotated[
        str | None, typer.Option(help="Time one forward by rows instead, as in 1,2,4,8,16.")
    ] = None
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Append the JSON document to this file.")
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON document alone.")] = False


@bench.callback()
@options.flatten
def _bench(context: typer.Context, model: ModelOptions, what: BenchOptions) -> None:
    if context.invoked_subcommand is not None:
        return
    import torch

    from hybrid.bench.environment import describe
    from hybrid.bench.prompts import PROMPTS, Prompt, read_prompts

    strategies = options.read_strategies(what.strategies, what.settings)
    widths = None if what.widths is None else _numbers(what.widths)
    prompts = [Prompt(p) for p in PROMPTS] if what.prompts is None else read_prompts(what.prompts)
    if what.threads is not None:
        torch.set_num_threads(what.threads)
    dtypes = [model.dtype] if what.also_dtype is None else [model.dtype, what.also_dtype]
    kinds = [replace(model, dtype=d) for d in dtypes]
    if what.also_exact:
        kinds += [replace(kind, exact=True) for kind in kinds]
    decoders = _by_precision([options.load_decoder(kind) for kind in kinds])
    if widths is not None:
        measured = _time_widths(decoders, widths)
    else:
        measured = _compare(model, what, decoders, strategies, prompts[: what.limit])
    device = next(iter(decoders.values())).backbone.device
    document = {**measured, "environment": describe(device)}
    document["settings"] = {**asdict(model), **document["settings"]}
    publish(document, what.out, as_json=what.as_json)


bench.command(epilog=bench_policies.EPILOG)(bench_policies.policies)


@bench.command()
def report(
    page: Annotated[Path, typer.Argument(help="Markdown, such as docs/results.md.")],
) -> None:
    """Make the tables of a page again, from the JSON lines that its markers name."""
    from hybrid.bench.page import render

    try:
        text = page.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"page: {page} cannot be read: {error}") from error
    page.write_text(render(text, page.parent), encoding="utf-8")


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"widths: got {text!r}, expected numbers such as 1,2,4,8.") from None


def _by_precision(decoders: list[HybridDecoder]) -> dict[str, HybridDecoder]:
    from hybrid.bench.candidates import precision

    named = {precision(decoder.backbone): decoder for decoder in decoders}
    if len(named) < len(decoders):
        raise ConfigError(f"also-dtype: got {next(iter(named))}, which --dtype measures already.")
    return named


def _time_widths(decoders: dict[str, HybridDecoder], widths: list[int]) -> dict[str, Any]:
    from hybrid.bench.widths import CONTEXT, REPEATS, time_widths

    backbones = {name: decoder.backbone for name, decoder in decoders.items()}
    return {
        "kind": "widths",
        "settings": {"context": CONTEXT, "repeats": REPEATS},
        "ms_per_forward": time_widths(backbones, widths),
    }


def _compare(
    model: ModelOptions,
    what: BenchOptions,
    decoders: dict[str, HybridDecoder],
    strategies: list[Strategy],
    asked: Sequence[Prompt],
) -> dict[str, Any]:
    from hybrid.bench.candidates import SEED, DecoderCandidate
    from hybrid.bench.prompts import encode_prompts
    from hybrid.bench.report import report_rows
    from hybrid.bench.runner import WARM_UP_TOKENS, measure

    first = next(iter(decoders.values()))
    prompts = encode_prompts([prompt.content for prompt in asked], first)
    categories = [prompt.category for prompt in asked]
    known = categories if any(categories) else None
    max_seq_len = max(map(len, prompts)) + what.max_new_tokens
    ours = [
        DecoderCandidate(decoder, strategy)
        for decoder in decoders.values()
        for strategy in strategies or _usual(decoder)
    ]
    with _baselines(model.model, what, first.backbone, max_seq_len) as baselines:
        candidates = [*baselines, *ours]
        samples = measure(candidates, prompts, what.max_new_tokens, progress=_progress)
        rows = report_rows(candidates, samples, prompts, what.max_new_tokens, known)
    return {
        "kind": "generate",
        "settings": {
            "prompts": "built-in" if what.prompts is None else what.prompts.name,
            "num_prompts": len(prompts),
            "categories": known,
            "num_prompt_tokens": [len(ids) for ids in prompts],
            "max_new_tokens": what.max_new_tokens,
            "temperature": 0,
            "seed": SEED,
            "batch": 1,
            "warm_up_tokens": min(WARM_UP_TOKENS, what.max_new_tokens),
        },
        "rows": rows,
    }


def _usual(decoder: HybridDecoder) -> Sequence[str | None]:
    return ("ar", "ngram", "speculative") if decoder.backbone.can_verify else (None,)


@contextmanager
def _baselines(
    model: str, what: BenchOptions, backbone: Backbone, max_seq_len: int
) -> Iterator[list[Candidate]]:
    """Yield the other engines that were asked for, and end their processes."""
    import torch

    from hybrid.bench.candidates import TransformersCandidate
    from hybrid.bench.llama_cpp import LlamaCpp, gguf_file
    from hybrid.models.reference import TransformersReference
    from hybrid.models.store import resolve

    found: list[Candidate] = []
    wanted = backbone.can_verify if what.transformers is None else what.transformers
    with ExitStack() as stack:
        if wanted:
            with options.progress_bar() as report:
                path = resolve(model, "float32", progress=report)
            found.append(TransformersCandidate(TransformersReference(path, backbone.device)))
        if what.llama_cpp is not None:
            process = LlamaCpp(
                what.llama_cpp,
                gguf_file(model),
                backbone.eos_token_ids,
                max_seq_len=max_seq_len,
                num_threads=torch.get_num_threads(),
            )
            stack.callback(process.close)
            found.append(process)
        yield found


def _progress(done: int, total: int) -> None:
    # A line per prompt: a bar that redraws itself would take time from what is measured.
    typer.echo(f"prompt {done}/{total}", err=True)
