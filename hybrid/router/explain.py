"""Why each step of a recorded run is what it is: as numbers, as text, as a picture.

The run is decided again (`replay`), so the reasons are those of the router, not stored prose.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hybrid.errors import ConfigError
from hybrid.pictures import new_figure, save_figure
from hybrid.router.choice import Option
from hybrid.router.record import Decision, RunHeader
from hybrid.types import Mode, RowStep, Source, StepRecord

_COLOURS = {
    Mode.AR: "lightgrey",
    Mode.SPECULATIVE: "gold",
    Mode.FUSED: "darkorange",
    Mode.ONE_PASS: "firebrick",
    Mode.DIFFUSION_ONLY: "indigo",
}
_COLUMNS = "step  mode            fed  kept  tokens      {unit}   value  next best"


def reasons(decisions: Iterable[Decision]) -> Iterator[dict[str, Any]]:
    """Yield what `hybrid explain --json` prints: one object for each decision of each step."""
    for number, decision in enumerate(decisions, 1):
        steps = {step.index: step for step in decision.record.rows}
        for explanation in decision.explanations:
            own = [steps[index] for index in explanation.rows]
            yield {
                "step": number,
                "rows": list(explanation.rows),
                "mode": max((step.mode for step in own), key=list(Mode).index).value,
                "num_drafted": max(step.num_drafted for step in own),
                "num_unverified": sum(step.num_unverified for step in own),
                "num_committed": sum(len(step.tokens) for step in own),
                "plans": explanation.plans,
                "chosen": _option(explanation.chosen),
                "runner_up": _option(explanation.runner_up),
                "rate": explanation.rate,
                "worth": explanation.worth,
                "trial": explanation.trial,
                "level": explanation.level,
                "threshold": explanation.threshold,
                "num_trusted": explanation.num_trusted,
                "has_looked": explanation.has_looked,
                "agrees": decision.agrees,
            }


def describe(header: RunHeader, decisions: Sequence[Decision]) -> Iterator[str]:
    """Yield lines of at most 80 columns: a summary, a legend, and the steps."""
    config = (header.router or {}).get("config", {})
    unit = "passes" if config.get("cost") == "forwards" else "    ms"
    records = [decision.record for decision in decisions]
    yield from _summary(header, records, config)
    yield ""
    yield "fed, kept: drafted tokens, committed tokens. tokens: expected from the step."
    yield "value: these and the worth of carried slots, less what the time buys elsewhere."
    yield ""
    yield _COLUMNS.format(unit=unit)
    for reason in reasons(decisions):
        yield _line(reason)
        notes = _notes(reason, many=len(header.rows) > 1)
        if notes:
            yield f"      {notes}"[:80]


def draw(header: RunHeader, records: Sequence[StepRecord], path: Path) -> Path:
    """Draw the run over its steps: tokens by source, modes, entropy and confidence of the drafts.

    Raises:
        ConfigError: matplotlib is missing, or there are no steps.
        CheckpointError: the picture cannot be written.
    """
    steps = [record for record in records if record.mode in _COLOURS]
    if not steps:
        raise ConfigError("the run has no decode steps, expected one at least.")
    figure = new_figure(11, 6)
    tokens, certainty = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    _draw_tokens(tokens, steps)
    _draw_certainty(certainty, steps)
    title = ", ".join(filter(None, (header.model, header.strategy)))
    tokens.set_title("".join(c if " " <= c <= "~" else "?" for c in title))  # any font has these
    certainty.set_xlabel("step; the strip above is its mode")
    return save_figure(figure, path)


def _draw_tokens(axes: Any, steps: Sequence[StepRecord]) -> None:
    numbers = range(1, len(steps) + 1)
    bottom = [0] * len(steps)
    for i, source in enumerate(Source):
        counts = [sum(row.sources.count(source) for row in step.rows) for step in steps]
        if any(counts):
            style = {"width": 1.0, "edgecolor": "white", "color": f"C{i}", "label": source.value}
            axes.bar(numbers, counts, bottom=bottom, **style)
            bottom = [a + b for a, b in zip(bottom, counts, strict=True)]
    height = max(bottom) / 15
    for mode, colour in _COLOURS.items():
        own = [n for n, step in zip(numbers, steps, strict=True) if step.mode == mode]
        if own:
            label = f"mode {mode.value}"
            axes.bar(own, height, bottom=-1.2 * height, width=1.0, color=colour, label=label)
    axes.set_ylabel("tokens by source")
    axes.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))


def _draw_certainty(axes: Any, steps: Sequence[StepRecord]) -> None:
    numbers = range(1, len(steps) + 1)
    curves = {
        "draft: confidence": [_mean(step.rows, "confidences") for step in steps],
        "draft: entropy, nats": [_mean(step.rows, "entropies") for step in steps],
        "next token: entropy, nats": [
            _average(row.next_entropy for row in step.rows if row.next_entropy is not None)
            for step in steps
        ],
    }
    for name, values in curves.items():
        if any(value == value for value in values):
            axes.plot(numbers, values, marker=".", linewidth=0.7, label=name)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))


def _mean(rows: Sequence[RowStep], name: str) -> float:
    return _average(value for row in rows for value in getattr(row, name))


def _average(values: Iterable[float]) -> float:
    """Return the mean of what is known, NaN (a gap in the curve) if nothing is."""
    known = [value for value in values if value == value]
    return sum(known) / len(known) if known else math.nan


def _summary(
    header: RunHeader, records: Sequence[StepRecord], config: dict[str, Any]
) -> Iterator[str]:
    names = ", ".join(filter(None, (header.model, header.strategy)))
    if names:
        yield names[:80]
    rows = [row for record in records for row in record.rows]
    num_tokens = sum(len(row.tokens) for row in rows)
    num_forwards = sum(r.num_draft_forwards + r.num_verify_forwards for r in records)
    yield (
        f"{len(header.rows)} rows, {len(records)} steps, {num_tokens} tokens, "
        f"{num_forwards} forwards, risk {config.get('risk', 0)}"
    )
    counts = Counter(record.mode for record in records)
    yield ", ".join(f"{mode.value} {counts[mode]}" for mode in Mode if counts[mode])
    sure = sum(row.num_unverified for row in rows)
    if sure:
        against = sum(sum(row.disagreements) for row in rows)
        yield f"{sure} tokens unverified, {against:.1f} of them disagree ({against / sure:.2%})"


def _line(reason: dict[str, Any]) -> str:
    chosen = reason["chosen"] or {"tokens": 0.0, "ms": 0.0, "value": 0.0}
    other = reason["runner_up"]
    next_best = f"{other['name']} {other['value']:+.2f}" if other else ""
    return (
        f"{reason['step']:>4}  {reason['mode']:<14} {reason['num_drafted']:>4} "
        f"{reason['num_committed']:>5} {chosen['tokens']:>7.2f} {chosen['ms']:>9.2f} "
        f"{chosen['value']:>+7.2f}  {next_best}"
    ).rstrip()


def _notes(reason: dict[str, Any], *, many: bool) -> str:
    """Return what else decided, in a few words."""
    notes = []
    if many:
        rows = reason["rows"]
        few = len(rows) <= 4
        notes.append(f"rows {','.join(map(str, rows))}" if few else f"{len(rows)} rows")
    if len(reason["plans"]) > 1:
        found = sorted(reason["plans"].items(), key=lambda item: -item[1])
        notes.append(" > ".join(f"{name} {value:+.2f}" for name, value in found))
    if reason["trial"]:
        notes.append(f"trial of {reason['trial']}")
    if not reason["has_looked"]:
        notes.append("by usual odds")
    if reason["threshold"] is not None:
        notes.append(
            f"trusts {reason['num_trusted']} at {reason['threshold']:.3g} (level {reason['level']})"
        )
    if not reason["agrees"]:
        notes.append("THE RUN DID SOMETHING ELSE")
    return "; ".join(notes)


def _option(option: Option | None) -> dict[str, Any] | None:
    if option is None:
        return None
    is_ar = option.mode == Mode.SPECULATIVE and not option.num_draft_tokens
    name = "ar" if is_ar else f"{option.mode.value} {option.num_draft_tokens}"
    return {
        "name": name,
        "mode": option.mode.value,
        "num_draft_tokens": option.num_draft_tokens,
        "tokens": option.tokens,
        "hits": option.hits,
        "ms": option.ms,
        "value": option.value,
    }
