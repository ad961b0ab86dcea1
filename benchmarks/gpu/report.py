"""The measurements as Markdown: ``python3 -m benchmarks.gpu.report gpu.json [PAGE.md]``.

Without a page it is printed; on a page it replaces what stands between the markers
``<!-- gpu:begin -->`` and ``<!-- gpu:end -->``. Made from the document alone.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.bars import (
    Record,
    bandwidth,
    bars,
    best_product,
    records_of,
    tests_passed,
    weight_ms,
)
from hybrid.bench.page import markdown_table
from hybrid.bench.tables import NOTHING, TextTable

BLOCK = re.compile(r"(<!-- gpu:begin -->\n).*?(<!-- gpu:end -->)", re.DOTALL)
DRY = "Dry run on a CPU: no number below means anything, and no bar is judged."
SPEED_ONLY = (
    "Models have random weights: speed only. How many tokens a step accepts was forced; nothing "
    "here says how many a trained model would accept."
)


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="gpu.json")
    parser.add_argument("page", type=Path, nargs="?", help="Markdown with the two markers")
    options = parser.parse_args()
    text = render(json.loads(options.results.read_text(encoding="utf-8")))
    if options.page is None:
        print(text)
        return 0
    page = options.page.read_text(encoding="utf-8")
    made, count = BLOCK.subn(lambda match: f"{match[1]}\n{text}\n\n{match[2]}", page)
    if count != 1:
        parser.error(f"{options.page} has {count} blocks, expected one between the two markers")
    options.page.write_text(made, encoding="utf-8")
    return 0


def render(document: Mapping[str, Any]) -> str:
    """Return the document as Markdown."""
    is_dry = document["settings"]["device"] == "cpu"
    copy, read = bandwidth(document, "copy"), bandwidth(document, "read")
    tables = [
        _bars(document, is_dry),
        _ceilings(records_of(document, "ceiling")),
        _kernels(records_of(document, "kernel"), copy, best_product(document)),
        _passes(records_of(document, "pass")),
        _steps(records_of(document, "step"), read),
        _looks(records_of(document, "look")),
        _memory(records_of(document, "memory")),
        _exact(records_of(document, "exact")),
    ]
    texts = [markdown_table(table) for table in tables if table.rows]
    remarks = [_tests(records_of(document, "tests")), _doubts(document, is_dry)]
    remarks += _unfinished(document)
    parts = [_source(document), DRY if is_dry else "", *remarks, SPEED_ONLY, *texts]
    return "\n\n".join(part for part in parts if part)


def _source(document: Mapping[str, Any]) -> str:
    env = document.get("environment")
    if env is None:
        return "Nothing could be measured."
    sha = (env["git_sha"] or "unknown")[:7] + (" with local changes" if env["is_dirty"] else "")
    where = env["gpu"] or env["cpu"]
    versions = f"torch {env['torch']}, triton {env['triton']}, transformers {env['transformers']}"
    driver = f", driver {env['driver']}, CUDA {env['cuda']}" if env["gpu"] else ""
    return f"{where}, {env['date'][:10]}, commit {sha}. Python {env['python']}, {versions}{driver}."


def _tests(records: Iterable[Record]) -> str:
    sentences = []
    for record in records:
        counts = ", ".join(f"{n} {name}" for name, n in sorted(record["counts"].items()))
        failed = f" Failed: {', '.join(record['failed'])}." if record["failed"] else ""
        sentences.append(f"Kernel tests on this device: {counts or 'none has run'}.{failed}")
    return " ".join(sentences) or "The kernels' tests have not run on this device."


def _doubts(document: Mapping[str, Any], is_dry: bool) -> str:
    if is_dry or tests_passed(document):
        return ""
    return "Not every test of the kernels that ran has passed, or none ran: no speed is judged."


def _unfinished(document: Mapping[str, Any]) -> list[str]:
    sentences = []
    for name, part in document["parts"].items():
        if part["status"] != "done":
            why = part.get("problem") or f"left out: {', '.join(part.get('left_out', []))}"
            sentences.append(f"Part {name} is not complete: {part['status']}, {why}.")
        for record in part["records"]:
            if "problem" in record:
                what = " ".join(str(record[key]) for key in ("op", "case") if key in record)
                sentences.append(f"{what or name}: {record['problem']}.")
    return sentences


def _bars(document: Mapping[str, Any], is_dry: bool) -> TextTable:
    rows, is_right = [], tests_passed(document)
    for bar in bars(document):
        is_judged = not is_dry and (is_right or not bar.needs_tests)
        verdict = "not judged" if not is_judged else "met" if bar.is_met else "missed"
        sign = "≥" if bar.at_least else "≤"
        value = str(bar.value) if isinstance(bar.value, int) else f"{bar.value:.3f}"
        rows.append((bar.what, f"{sign} {bar.limit:g}", value, verdict))
    counts = ", ".join(f"{n} {verdict}" for verdict, n in Counter(r[-1] for r in rows).items())
    return TextTable(f"Bars: {counts}", ("what", "bar", "measured", ""), tuple(rows))


def _ceilings(records: Iterable[Record]) -> TextTable:
    rows = tuple((r["name"], _number(r, "gbytes_per_s"), _number(r, "tflops")) for r in records)
    return TextTable("Ceilings of the card", ("what", "GB/s", "TFLOP/s"), rows)


def _kernels(records: Iterable[Record], copy: float | None, product: float | None) -> TextTable:
    rows = []
    for record in records:
        times = record["microseconds"]
        median = times["median"]
        against = "; ".join(_against(name, r, median) for name, r in record["others"].items())
        of_copy = record["gbytes_per_s"] / copy if copy else None
        of_product = record["tflops"] / product if product else None
        # What takes the card longer is what bounds it: its share is the larger of the two.
        is_bound = of_product is not None and of_copy is not None and of_product > of_copy
        rows.append(
            (
                f"{record['op']} {record['case']}",
                f"{median:.1f} ({times['p20']:.1f} to {times['p80']:.1f}){_how(times)}",
                f"{record['gbytes_per_s']:.0f}",
                NOTHING if of_copy is None else f"{of_copy:.0%}",
                f"{record['tflops']:.1f}" if record["flops"] else NOTHING,
                f"{of_product:.0%}" if is_bound else NOTHING,
                against,
            )
        )
    columns = (
        "kernel", "µs (p20 to p80)", "GB/s", "of copy", "TFLOP/s", "of product", "others, µs"
    )  # fmt: skip
    return TextTable("Kernels, by replayed graphs, L2 cache flushed", columns, tuple(rows))


def _against(name: str, other: Record, median: float) -> str:
    if "problem" in other:
        return f"{name}: {other['problem'].split(':')[0]}"
    return f"{name}{_how(other)} {other['median']:.1f} ({other['median'] / median:.2f} ×)"


def _how(times: Record) -> str:
    return "" if times["is_graph"] else ", eager"


def _passes(records: Iterable[Record]) -> TextTable:
    runs: dict[str, dict[int, float]] = {}
    for record in records:
        runs.setdefault(_run(record), {})[record["width"]] = record["ms"]["median"]
    widths = sorted({width for times in runs.values() for width in times})
    rows = tuple(
        (name, *(f"{times[w]:.3f}" if w in times else NOTHING for w in widths))
        for name, times in runs.items()
    )
    title = "Milliseconds of a pass by its tokens"
    return TextTable(title, ("model, CUDA graphs", *map(str, widths)), rows)


def _steps(records: Iterable[Record], read: float | None) -> TextTable:
    rows, ar = [], {}
    for record in records:
        median, length = record["ms"]["median"], record["acceptance_length"]
        if record["mode"] == "ar":
            ar[_run(record)] = median
        base = ar.get(_run(record))
        has_limit = read is not None and "weight_bytes" in record
        rows.append(
            (
                f"{_run(record)}, {record['mode']}",
                str(length),
                f"{median:.3f}",
                f"{record['draft_passes']:.2f}",
                f"{1e3 * length / median:.0f}",
                f"{base * length / median:.2f}" if base else NOTHING,
                f"{median / weight_ms(record, read):.2f}" if has_limit else NOTHING,
            )
        )
    columns = (
        "model, CUDA graphs, mode", "forced acceptance length", "ms per step",
        "draft passes", "tokens/s", "× ar", "× reading the weights",
    )  # fmt: skip
    return TextTable("Steps, batch 1, greedy", columns, tuple(rows))


def _looks(records: Iterable[Record]) -> TextTable:
    rows = tuple((_run(r), str(r["drafted"]), f"{r['ms']:.3f}") for r in records)
    title = "Milliseconds more of a step that looks at its draft before the target pass, batch 1"
    return TextTable(title, ("model, CUDA graphs", "drafted", "ms"), rows)


def _memory(records: Iterable[Record]) -> TextTable:
    rows = []
    for record in records:
        planned, peak = record["planned"]["total"], record["peak_bytes"]
        rows.append(
            (
                _run(record),
                f"{planned / 2**20:.0f}",
                NOTHING if peak is None else f"{peak / 2**20:.0f}",
                NOTHING if peak is None else f"{peak / planned:.2f}",
            )
        )
    columns = ("model, CUDA graphs", "planned", "peak", "peak / planned")
    return TextTable("Memory of a generation, MiB", columns, tuple(rows))


def _exact(records: Iterable[Record]) -> TextTable:
    records = list(records)
    plain = {(r["model"], r["width"]): r["ms"]["median"] for r in records if not r["exact"]}
    rows = []
    for record in records:
        median, base = record["ms"]["median"], plain.get((record["model"], record["width"]))
        rows.append(
            (
                f"{record['model']}, exact {'on' if record['exact'] else 'off'}",
                str(record["width"]),
                f"{median:.3f}",
                f"{median / base:.2f}" if base else NOTHING,
                f"{record['differing_logits']} of {record['logits']}",
                str(record["differing_choices"]),
            )
        )
    columns = (
        "model", "tokens", "ms per pass", "× off", "logits unlike AR's", "choices unlike AR's"
    )  # fmt: skip
    return TextTable("`exact`: its cost, and bits of a verify pass beside AR", columns, tuple(rows))


def _run(record: Record) -> str:
    return f"{record['model']}, {'on' if record['graphs'] else 'off'}"


def _number(record: Record, name: str) -> str:
    return f"{record[name]:.0f}" if name in record else NOTHING


if __name__ == "__main__":
    raise SystemExit(main())
