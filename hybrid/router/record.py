"""A run as JSON lines: what the router began with, then one `StepRecord` a line; and its replay.

Next: hybrid/router/explain.py.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from hybrid.errors import CheckpointError, ConfigError
from hybrid.files import replacing
from hybrid.params import SamplingParams
from hybrid.router.choice import Explanation
from hybrid.router.config import ROUTED
from hybrid.router.hybrid import Draft, HybridRouter
from hybrid.streams import RandomStream
from hybrid.types import Plan, Route, SequenceState, StepRecord

FORMAT = 1


@dataclass(frozen=True, slots=True)
class RowHeader:
    """What the router knows of a request before its first step.

    Attributes:
        index: of the request in the call's list.
        num_prompt_tokens: its prompt.
        max_new_tokens: the most tokens to generate.
        is_greedy: whether the token is the argmax.
    """

    index: int
    num_prompt_tokens: int
    max_new_tokens: int
    is_greedy: bool


@dataclass(frozen=True, slots=True)
class RunHeader:
    """The first line of a run.

    Attributes:
        rows: the requests.
        router: see `HybridRouter.header`; None for a strategy without one.
        model: its name.
        strategy: as it was asked for.
        versions: of this package and of those that matter.
        format: of the file.
    """

    rows: tuple[RowHeader, ...]
    router: Mapping[str, Any] | None = None
    model: str = ""
    strategy: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    format: int = FORMAT

    @classmethod
    def of(cls, rows: Sequence[SequenceState], router: HybridRouter, **names: Any) -> RunHeader:
        """Return the header of a call, from its rows and its router; `names` are the rest."""
        headers = tuple(
            RowHeader(
                row.row, row.num_prompt_tokens, row.sampling.max_new_tokens, row.sampling.is_greedy
            )
            for row in rows
        )
        return cls(headers, router.header(), **names)


@dataclass(frozen=True, slots=True)
class Decision:
    """A recorded step, and what the router decides when it is asked again.

    Attributes:
        record: the step.
        plans: one per row of it.
        routes: one per row.
        explanations: why; one for all rows that were decided together.
    """

    record: StepRecord
    plans: tuple[Plan, ...]
    routes: tuple[Route, ...]
    explanations: tuple[Explanation, ...]

    @property
    def agrees(self) -> bool:
        """Whether the step did what the router decides now."""
        return all(
            (route.num_draft_tokens, route.num_unverified, route.points)
            == (row.num_drafted, row.num_unverified, row.points)
            for route, row in zip(self.routes, self.record.rows, strict=True)
        )


def replay(header: RunHeader, records: Iterable[StepRecord]) -> Iterator[Decision]:
    """Ask a router like the run's for each decision again; prefill has none.

    Raises:
        ConfigError: the run had no such router, or a record is of a row that is not in the header.
    """
    if header.router is None:
        raise ConfigError(
            f"the run of strategy {header.strategy!r} was not routed, expected 'hybrid'."
        )
    router, history = HybridRouter.from_header(header.router), list[StepRecord]()
    rows = {own.index: _state(own) for own in header.rows}
    for record in records:
        strange = [step.index for step in record.rows if step.index not in rows]
        if strange:
            raise ConfigError(f"got rows {strange}, expected some of {list(rows)}: other run?")
        if record.mode in ROUTED:
            active = [rows[step.index] for step in record.rows]
            drafts = [
                Draft(step.num_proposed, step.first_slot, step.confidences) for step in record.rows
            ]
            plans = router.plan(active, history)
            drafting = record.num_drafting if record.num_draft_forwards else 0
            routes = router.route(active, drafts, drafting, history)
            yield Decision(record, plans, routes, router.explanations)
        history.append(record)
        for step in record.rows:
            rows[step.index].tokens.extend(step.tokens)


def write_run(path: Path, header: RunHeader, records: Iterable[StepRecord]) -> None:
    """Write a run; what was there before is replaced at the end.

    Raises:
        CheckpointError: the file cannot be written.
    """
    with replacing(path) as part, part.open("w", encoding="utf-8") as file:
        for noun in (header, *records):
            file.write(json.dumps(_encode(noun)) + "\n")


def read_run(path: Path) -> tuple[RunHeader, tuple[StepRecord, ...]]:
    """Read what `write_run` wrote, exactly.

    Raises:
        CheckpointError: no such file, or a line that is none of ours; the message has its number.
    """
    nouns: list[Any] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    kind = StepRecord if nouns else RunHeader
                    nouns.append(_decode(json.loads(line), kind))
                    if number == 1 and nouns[0].format != FORMAT:
                        raise ValueError(f"got format {nouns[0].format}, expected {FORMAT}.")
                except ValueError as error:
                    what = "a step" if nouns else "the first line of a recorded run"
                    raise CheckpointError(
                        f"{path}, line {number}: expected {what}: {error}"
                    ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not nouns:
        raise CheckpointError(f"{path} is empty, expected a recorded run.")
    return nouns[0], tuple(nouns[1:])


def _state(header: RowHeader) -> SequenceState:
    """Return the row before its first token; nobody looks at the prompt, or draws a number."""
    sampling = SamplingParams(
        temperature=0.0 if header.is_greedy else 1.0, max_new_tokens=header.max_new_tokens
    )
    prompt = [0] * header.num_prompt_tokens
    return SequenceState(header.index, prompt, header.num_prompt_tokens, sampling, RandomStream(0))


def _encode(value: Any) -> Any:
    """Return JSON types; fields that have their default value are left out."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        return {
            name.name: _encode(own)
            for name in fields(value)
            if (own := getattr(value, name.name)) != name.default or name.name == "format"
        }
    if isinstance(value, Mapping):
        return {str(key): _encode(own) for key, own in value.items()}
    return [_encode(own) for own in value] if isinstance(value, (tuple, list)) else value


def _decode(value: Any, kind: Any) -> Any:
    """Return the value of a type that JSON `value` stands for; raise ValueError if it does not."""
    if kind is Any:
        return value
    origin, inner = get_origin(kind), get_args(kind)
    if origin is types.UnionType:
        return None if value is None else _decode(value, inner[0])
    if origin is tuple and isinstance(value, list):
        return tuple(_decode(own, inner[0]) for own in value)
    if origin is not None and origin is not tuple and isinstance(value, dict):
        return {inner[0](key): _decode(own, inner[1]) for key, own in value.items()}
    noun: Any = kind
    if is_dataclass(kind) and isinstance(value, dict):
        hints, needed = _shape(noun)
        wrong = (value.keys() - hints.keys()) | (needed - value.keys())
        if wrong:
            raise ValueError(f"unknown or missing: {', '.join(sorted(wrong))}.")
        return noun(**{name: _decode(own, hints[name]) for name, own in value.items()})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"got {value!r}, expected {getattr(kind, '__name__', kind)}.")
    return value


@cache
def _shape(kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the types of a noun's fields, and the fields without a default."""
    needed = frozenset(
        own.name
        for own in fields(kind)
        if own.default is MISSING and own.default_factory is MISSING
    )
    return get_type_hints(kind), needed
