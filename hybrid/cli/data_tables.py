"""What ``hybrid data inspect`` prints for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybrid.tui.text import clean

if TYPE_CHECKING:
    from hybrid.training.describe import Description

_MOST_CATEGORIES = 20
_PERCENTILE_NAMES = {0: "min", 50: "median", 100: "max"}


def print_description(description: Description) -> None:
    """Print tables of the numbers, then the samples."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in _facts(description).items():
        table.add_row(name, clean(value))
    console.print(table)
    if description.num_examples:
        lengths = Table("tokens", title="Lengths by percentile", title_justify="left")
        for percentile in description.prompt_lengths:
            name = _PERCENTILE_NAMES.get(percentile, f"{percentile} %")
            lengths.add_column(name, justify="right")
        for name, row in (
            ("prompt", description.prompt_lengths),
            ("response", description.response_lengths),
        ):
            lengths.add_row(name, *map(str, row.values()))
        console.print(lengths)
    for number, sample in enumerate(description.samples, start=1):
        console.rule(f"sample {number}", align="left")
        console.print(clean(sample["prompt"]), style="dim", end="", soft_wrap=True)
        console.print(clean(sample["response"]), soft_wrap=True)


def _facts(description: Description) -> dict[str, str]:
    d = description
    facts = {
        "examples": f"{d.num_examples:,}",
        "prompt tokens": f"{d.num_prompt_tokens:,}",
        "response tokens": f"{d.num_response_tokens:,}",
        "ended by EOS": "unknown" if d.share_ended is None else f"{d.share_ended:.1%}",
        "duplicate prompts": f"{d.num_duplicates:,}",
        "distinct tokens": f"{d.num_distinct:,} in the responses",
    }
    for share, size in d.coverage.items():
        facts[f"{100 * share:g} % covered by"] = f"the {size:,} most frequent"
    if d.categories:
        shown = list(d.categories.items())[:_MOST_CATEGORIES]
        more = len(d.categories) - len(shown)
        facts["categories"] = ", ".join(f"{name} {count:,}" for name, count in shown)
        facts["categories"] += f" and {more} more" if more else ""
    facts["bad lines"] = f"{d.num_bad:,}"
    if d.first_bad is not None:
        facts["first bad line"] = d.first_bad
    return facts
