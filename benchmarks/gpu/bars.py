"""What was to be reached on a GPU, and whether it was: computed from the numbers alone.

Next: benchmarks/gpu/report.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

AR_LIMIT = 1.25  # times the reading of the weights
WIDE_LIMIT, WIDE = 1.15, 32  # times a pass of one token

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Bar:
    """One of them.

    Attributes:
        what: is measured.
        value: what it was.
        limit: what it should be.
        at_least: whether the value should not be below the limit, or not above it.
        needs_tests: whether it says nothing where the kernels may be wrong.
    """

    what: str
    value: float
    limit: float
    at_least: bool
    needs_tests: bool = True

    @property
    def is_met(self) -> bool:
        """Whether it was reached."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def records_of(document: Mapping[str, Any], kind: str) -> list[Record]:
    """Return the records of a kind that are no failures, whatever part they are in."""
    parts = document["parts"].values()
    records = (record for part in parts for record in part["records"])
    return [r for r in records if r["kind"] == kind and "problem" not in r]


def bandwidth(document: Mapping[str, Any], name: str) -> float | None:
    """Return the best measured GB/s of the ceilings whose name begins so, None without any."""
    ceilings = records_of(document, "ceiling")
    found = [r["gbytes_per_s"] for r in ceilings if r["name"].startswith(name)]
    return max(found, default=None)


def best_product(document: Mapping[str, Any]) -> float | None:
    """Return the best measured TFLOP/s, None without any."""
    found = [r["tflops"] for r in records_of(document, "ceiling") if "tflops" in r]
    return max(found, default=None)


def tests_passed(document: Mapping[str, Any]) -> bool:
    """Whether the kernels' tests ran on this device, and none that was reached in time failed."""
    records = records_of(document, "tests")
    return bool(records) and all(
        r["counts"].get("passed") and not r["failed"] and r["exit_code"] in (None, 0)
        for r in records
    )


def bars(document: Mapping[str, Any]) -> list[Bar]:
    """Return the bars for which everything was measured."""
    found = list(_of_kernels(document))
    read = bandwidth(document, "read")
    for model, graphs in _runs(document):
        title = f"{model}, CUDA graphs {'on' if graphs else 'off'}"
        passes = {r["width"]: r for r in _of(document, "pass", model, graphs)}
        steps = [r for r in _of(document, "step", model, graphs) if r["mode"] == "ar"]
        if steps and read:
            value = steps[0]["ms"]["median"] / weight_ms(steps[0], read)
            found.append(Bar(f"{title}: AR step / reading the weights", value, AR_LIMIT, False))
        if {1, WIDE} <= passes.keys():
            value = passes[WIDE]["ms"]["median"] / passes[1]["ms"]["median"]
            what = f"{title}: pass of {WIDE} tokens / pass of one"
            found.append(Bar(what, value, WIDE_LIMIT, False))
    return [*found, *_of_exact(document)]


def weight_ms(record: Record, gbytes_per_s: float) -> float:
    """Return the milliseconds that reading the weights takes at least."""
    return float(record["weight_bytes"]) / gbytes_per_s / 1e6


def _of_kernels(document: Mapping[str, Any]) -> Iterator[Bar]:
    copy = bandwidth(document, "copy")
    for record in records_of(document, "kernel"):
        if copy and record["bar"] is not None:
            what = f"{record['op']} {record['case']}: share of copy bandwidth"
            yield Bar(what, record["gbytes_per_s"] / copy, record["bar"], True)


def _of_exact(document: Mapping[str, Any]) -> Iterator[Bar]:
    records = [r for r in records_of(document, "exact") if r["exact"]]
    for model in dict.fromkeys(r["model"] for r in records):
        differing = sum(r["differing_logits"] for r in records if r["model"] == model)
        yield Bar(f"{model}, exact: logits unlike AR's", differing, 0, False, needs_tests=False)


def _runs(document: Mapping[str, Any]) -> Sequence[tuple[str, bool]]:
    records = [*records_of(document, "pass"), *records_of(document, "step")]
    return list(dict.fromkeys((r["model"], r["graphs"]) for r in records))


def _of(document: Mapping[str, Any], kind: str, model: str, graphs: bool) -> list[Record]:
    records = records_of(document, kind)
    return [r for r in records if (r["model"], r["graphs"]) == (model, graphs)]
