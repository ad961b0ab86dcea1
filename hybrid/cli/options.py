"""Flags that several commands share, and the one place where a command loads a decoder."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from hybrid.config import parse_setting
from hybrid.errors import ConfigError
from hybrid.params import SamplingParams

if TYPE_CHECKING:
    from hybrid.decoder import HybridDecoder
    from hybrid.strategy import Strategy

_DEFAULTS = SamplingParams()


def _flag(help: str, *names: str, panel: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **settings)


_model = functools.partial(_flag, panel="Model")
_sampling = functools.partial(_flag, panel="Sampling")
_strategy = functools.partial(_flag, panel="Strategy")
Settings = Annotated[
    list[str], _strategy("A parameter of the strategy; repeatable.", "--set", metavar="KEY=VALUE")
]


@dataclass(frozen=True)
class ModelOptions:
    """Which model, where and how."""

    model: Annotated[
        str, _model("default, a folder, a GGUF file or a hub id.", "--model", "-m")
    ] = "default"
    device: Annotated[str, _model("auto, cpu, cuda or cuda:N.")] = "auto"
    dtype: Annotated[str, _model("auto, float32, bfloat16 or int4.")] = "auto"
    adapter: Annotated[str | None, _model("Draft adapter: a folder; default: the model's own.")] = (
        None
    )
    drafter: Annotated[str | None, _model("What proposes tokens; see hybrid list.")] = None
    verifier: Annotated[str, _model("What accepts tokens; see hybrid list.")] = "auto"
    num_draft_tokens: Annotated[int | None, _model("Tokens proposed per step.")] = None
    exact: Annotated[
        bool, _model("Logits have the same bits whatever shares a pass; slower.", "--exact")
    ] = False
    compile: Annotated[
        bool, _model("On a CPU: torch.compile what is no product; try it.", "--compile")
    ] = False


@dataclass(frozen=True)
class StrategyOptions:
    """How tokens are produced."""

    strategy: Annotated[
        str | None,
        _strategy("See hybrid list presets; default: what the model's weights are meant for."),
    ] = None
    settings: Settings = field(default_factory=list)
    risk: Annotated[
        float | None,
        _strategy("Of strategy hybrid: share of tokens that may differ from what AR would say."),
    ] = None
    allow_unverified: Annotated[
        bool,
        _strategy("Let a model verify that was not trained to.", "--allow-unverified"),
    ] = False

    def preset(self, default: str | None = None) -> Strategy | None:
        """Return the strategy that is named, else that of `default`, with its parameters.

        Raises:
            ConfigError: no such preset or parameter, or a value outside its range.
        """
        from hybrid.strategy import with_risk

        name = self.strategy or ("hybrid" if self.risk is not None else default)
        chosen = with_risk(None if name is None else _preset(name, self.settings), self.risk)
        assert not isinstance(chosen, str)
        return chosen

    def resolve(self, decoder: HybridDecoder) -> Strategy:
        """Return what is decoded with.

        Raises:
            ConfigError: as `preset`, or the model cannot do it.
        """
        chosen = self.preset(decoder.backbone.default_strategy)
        return decoder.resolve_strategy(chosen, allow_unverified=self.allow_unverified)


@dataclass(frozen=True)
class SamplingOptions:
    """The fields of `SamplingParams`, one flag each."""

    temperature: Annotated[float, _sampling("0 is greedy.", "--temperature", "-t")] = (
        _DEFAULTS.temperature
    )
    top_k: Annotated[int, _sampling("Keep the k most probable; 0 keeps all.")] = _DEFAULTS.top_k
    top_p: Annotated[float, _sampling("Keep the most probable up to this mass.")] = _DEFAULTS.top_p
    min_p: Annotated[float, _sampling("Drop below this share of the largest.")] = _DEFAULTS.min_p
    repetition_penalty: Annotated[float, _sampling("Divides seen tokens; 1 is off.")] = (
        _DEFAULTS.repetition_penalty
    )
    presence_penalty: Annotated[float, _sampling("Subtracted from generated tokens.")] = (
        _DEFAULTS.presence_penalty
    )
    frequency_penalty: Annotated[float, _sampling("Subtracted once per occurrence.")] = (
        _DEFAULTS.frequency_penalty
    )
    seed: Annotated[int | None, _sampling("Same seed, same answer.")] = _DEFAULTS.seed
    max_new_tokens: Annotated[int, _sampling("Length limit.", "--max-new-tokens", "-n")] = (
        _DEFAULTS.max_new_tokens
    )
    min_new_tokens: Annotated[int, _sampling("No end before this many.")] = _DEFAULTS.min_new_tokens
    stop: Annotated[list[str], _sampling("End before this text; repeatable.")] = field(
        default_factory=list
    )
    stop_token_ids: Annotated[
        list[int], _sampling("End at this token id; repeatable.", "--stop-token-id")
    ] = field(default_factory=list)
    ignore_eos: Annotated[bool, _sampling("Go on after the end token.", "--ignore-eos")] = (
        _DEFAULTS.ignore_eos
    )
    logprobs: Annotated[int | None, _sampling("Log-probabilities of n alternatives (--json).")] = (
        _DEFAULTS.logprobs
    )

    def to_params(self) -> SamplingParams:
        """Return the validated parameters.

        Raises:
            ConfigError: a value outside its range.
        """
        return SamplingParams(**asdict(self))


def read_strategies(names: str | None, settings: list[str]) -> list[Strategy]:
    """Return the strategies of a list separated by commas, each once; none if there is no list.

    Raises:
        ConfigError: an unknown name or parameter, or parameters beside several names.
    """
    found = list(dict.fromkeys(name.strip() for name in names.split(","))) if names else []
    if settings and len(found) != 1:
        raise ConfigError(
            f"--set: got parameters for {len(found)} strategies, expected one. Name the strategy "
            "that they belong to: --strategies NAME."
        )
    return [_preset(name, settings) for name in found]


def _preset(name: str, settings: list[str]) -> Strategy:
    from hybrid.strategy import Strategy

    return Strategy.preset(name, **dict(parse_setting(text, "--set") for text in settings))


def flatten(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter that is a dataclass of flags by the flags, for typer to see."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {}
    parameters = []
    for parameter in signature.parameters.values():
        if not is_dataclass(parameter.annotation):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        groups[parameter.name] = parameter.annotation
        hints = get_type_hints(parameter.annotation, include_extras=True)
        parameters += [
            inspect.Parameter(
                flag.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=[] if flag.default is MISSING else flag.default,
                annotation=hints[flag.name],
            )
            for flag in fields(parameter.annotation)
        ]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{flag.name: values.pop(flag.name) for flag in fields(group)})
        command(**values)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def load_decoder(options: ModelOptions) -> HybridDecoder:
    """Load the decoder that the flags describe, with a progress bar on stderr.

    Raises:
        HybridError: the model, adapter, drafter or verifier is not usable.
    """
    from hybrid.decoder import HybridDecoder

    with progress_bar() as report:
        return HybridDecoder.from_pretrained(**asdict(options), progress=report)


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a progress callback: a bar on a terminal, else one line per stage."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    tasks: dict[str, Any] = {}
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total or None)
                if not console.is_terminal:
                    typer.echo(f"{stage} ...", err=True)
            progress.update(tasks[stage], completed=done, total=total or None)

        yield report


def read_text(argument: str) -> str:
    """Return the argument, or all of stdin without its last newline when it is ``-``.

    Raises:
        ConfigError: the text is not UTF-8.
    """
    try:
        if argument == "-":
            return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n").removesuffix("\r")
        argument.encode("utf-8")
    except UnicodeError as error:
        raise ConfigError(f"The prompt is not valid UTF-8: {error}") from None
    return argument
