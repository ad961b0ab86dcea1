"""From a turn to rich renderables. Pure: no terminal, no clock, no state.

Next: hybrid/tui/screen.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from markdown_it import MarkdownIt
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.containers import Lines
from rich.markdown import Markdown
from rich.segment import Segment
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

from hybrid.tui.canvas import SHADES, shades_for, slots_text
from hybrid.tui.text import clean
from hybrid.tui.turn import Turn
from hybrid.types import Source, Stats, StepRecord

# Palette colours with a contrast of at least 3 : 1 on black and on white (a test computes it).
# Bold and underline keep the rare kinds apart where colour is off (NO_COLOR).
TINTS: dict[Source, str] = {
    Source.PROMPT: "dim",
    Source.AR: "",
    Source.DRAFT_VERIFIED: "color(28)",
    Source.CORRECTION: "bold color(166)",
    Source.BONUS: "bold color(166)",
    Source.DIFFUSION_ONLY: "underline color(134)",
}
# Rich's own style for inline code is a black patch on a light terminal.
THEME = Theme({"markdown.code": "bold cyan", "markdown.code_block": "cyan"})
_LEGEND = {
    Source.AR: "autoregressive: one forward, one token",
    Source.DRAFT_VERIFIED: "drafted by diffusion, accepted by the verifier",
    Source.CORRECTION: "correction or bonus: the target's own token after the draft",
    Source.DIFFUSION_ONLY: "written by diffusion, not verified",
}


@dataclass(frozen=True)
class Glyphs:
    """Marks of the strip, where `step` is one that drafted nothing, and of slots.

    A slot is `masked`, or `blank` when its token has no text.
    """

    accepted: str = "▮"
    rejected: str = "▯"
    step: str = "·"
    more: str = "…"
    masked: str = "░"
    blank: str = "∎"


ASCII = Glyphs(accepted="#", rejected="-", step=".", more="~", masked="_", blank="$")


def glyphs_for(console: Console) -> Glyphs:
    """Return marks that the console's encoding has."""
    return Glyphs() if console.encoding.lower().startswith("utf") else ASCII


def tint(pieces: Iterable[tuple[str, Source]]) -> Text:
    """Return the pieces as one text, each in the colour of its source."""
    runs = groupby(pieces, key=lambda piece: TINTS[piece[1]])
    return Text.assemble(*((clean("".join(text for text, _ in run)), style) for style, run in runs))


def markdown(text: str) -> RenderableType:
    """Return the answer as Markdown in which nothing is hidden.

    Inline HTML is shown as written (rich would drop ``List<int>``), and a link shows its address.
    """
    rendered = Markdown(clean(text), hyperlinks=False, code_theme="ansi_dark")
    parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
    rendered.parsed = parser.parse(rendered.markup)
    return _Trimmed(rendered)


@dataclass(frozen=True)
class _Trimmed:
    """Content without the blanks that rich puts at line ends: they spoil copying and resizing."""

    content: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in Segment.split_lines(console.render(self.content, options)):
            while line and not line[-1].text.strip() and not line[-1].control:
                line.pop()
            if line:
                last = line.pop()
                yield from line
                yield Segment(last.text.rstrip(), last.style)
            yield Segment.line()


def strip(steps: Sequence[StepRecord], width: int, marks: Glyphs | None = None) -> Text:
    """Return the last steps that fit `width` cells, drafted against accepted: ``▮▮▮▯▯ ▮▯▯▯▯``."""
    marks = marks or Glyphs()
    shown: list[Text] = []
    room = width
    rows = [row for step in steps for row in step.rows if row.tokens]
    for row in reversed(rows):
        cell = _strip_cell(row.num_accepted, row.num_drafted, width, marks)
        needed = cell.cell_len + (1 if shown else 0)
        reserve = 2 if len(shown) + 1 < len(rows) else 0
        if needed + reserve > room:
            shown.append(Text(marks.more, "dim"))
            break
        room -= needed
        shown.append(cell)
    return Text(" ").join(reversed(shown))


def _strip_cell(num_accepted: int, num_drafted: int, width: int, marks: Glyphs) -> Text:
    """Return one step; counts instead of marks when it would take over half of the strip."""
    if not num_drafted:
        return Text(marks.step, "dim")
    green, dim = TINTS[Source.DRAFT_VERIFIED], "dim"
    if num_drafted > max(width // 2, 8):
        return Text.assemble((str(num_accepted), green), (f"/{num_drafted}", dim))
    accepted, rejected = marks.accepted * num_accepted, num_drafted - num_accepted
    return Text.assemble((accepted, green), (marks.rejected * rejected, dim))


def status(turn: Turn, width: int) -> Text:
    """Return mode, speed, acceptance, TPF and context, on as many lines as `width` needs."""
    mode, stats = turn.mode.value, turn.stats
    # The mode changes from step to step; of a whole answer only the strategy can be said.
    is_plain = turn.is_complete or turn.strategy == mode
    parts = [turn.strategy if is_plain else f"{turn.strategy} ({mode})"]
    if stats.num_new_tokens:
        parts.append(f"{stats.tokens_per_second:.1f} tok/s")
    if stats.num_denoise_forwards:
        parts.append(f"{stats.num_denoise_forwards} denoising")
    elif stats.num_verify_forwards:
        parts.append(f"acceptance {stats.acceptance_length:.2f}")
        if stats.num_unverified:
            parts.append(f"{stats.num_unverified} unverified")
    if stats.tokens_per_forward:
        parts.append(f"TPF {stats.tokens_per_forward:.2f}")
    if turn.max_seq_len:
        parts.append(f"context {turn.num_context_tokens}/{turn.max_seq_len}")
    lines = [parts[0]]
    for part in parts[1:]:
        joined = f"{lines[-1]} | {part}"
        if cell_len(joined) <= width:
            lines[-1] = joined
        else:
            lines.append(part)
    return Text("\n".join(lines), "dim", no_wrap=True, overflow="crop")


def live_frame(turn: Turn, console: Console) -> RenderableType:
    """Return the region that is redrawn while the answer grows: its tail, the strip, the status.

    Behind the answer stand the slots that are being denoised, as many as there is room for. Never
    taller than the terminal, so that redrawing cannot disturb the lines above it.
    """
    width, marks = console.width, glyphs_for(console)
    footer = [strip(turn.steps, width, marks), *status(turn, width).split()]
    footer = footer[: max(console.height - 2, 0)]
    for line in footer:
        line.truncate(width)
    room = max(console.height - 1 - len(footer), 1)
    answer = tint(_tail(turn.pieces, width * room))
    lines = answer.wrap(console, width)
    begin = len(lines) - 1  # of what is not final
    slots = turn.slots[: width * room]
    if slots:
        shades = shades_for(console)
        filling = slots_text(slots, turn.text_of, shades, masked=marks.masked, blank=marks.blank)
        lines = answer.append_text(filling).wrap(console, width)
    if not answer:
        lines = Lines([Text("…" if turn.steps else "reading…", "dim")])
    # The end of all, or what is being filled where there is no room for all of it.
    first = max(min(begin, len(lines) - room), 0)
    return Group(*lines[first : first + room], *footer)


def _tail(pieces: list[tuple[str, Source]], num_chars: int) -> list[tuple[str, Source]]:
    """Return the last pieces, from a line's beginning, with at least `num_chars` characters.

    Wrapping the whole of a long answer at each redraw would take time from decoding.
    """
    size = 0
    for index in range(len(pieces) - 1, -1, -1):
        text, source = pieces[index]
        size += len(text)
        if size > num_chars and "\n" in text:
            return [(text[text.index("\n") + 1 :], source), *pieces[index + 1 :]]
    return pieces


def finished(turn: Turn, console: Console) -> RenderableType:
    """Return the final form of an answer: Markdown, then the strip and the status."""
    parts: list[RenderableType] = [markdown(turn.text)] if turn.text.strip() else []
    if turn.result is None:
        parts.append(Text("[stopped]", TINTS[Source.CORRECTION]))
    elif turn.result.finish_reason == "length":
        parts.append(Text("[cut at the length limit]", "dim"))
    parts.append(strip(turn.steps, console.width, glyphs_for(console)))
    parts.append(status(turn, console.width))
    return Group(*parts)


def legend(turn: Turn | None = None, marks: Glyphs | None = None) -> RenderableType:
    """Return what the colours and marks mean, and the last answer in its colours."""
    marks = marks or Glyphs()
    table = Table.grid(padding=(0, 2))
    for source, meaning in _LEGEND.items():
        table.add_row(Text("sample", TINTS[source]), Text(meaning))
    table.add_row(
        Text(marks.accepted * 3 + marks.rejected * 2), Text("a step: 3 of 5 drafted accepted")
    )
    table.add_row(Text(marks.step), Text("a step without a draft"))
    filled = Text.assemble((marks.masked * 2, "dim"), *(("ab", shade) for shade in SHADES))
    table.add_row(filled, Text("slots: masked, and filled, the surer the brighter"))
    if turn is None or not turn.pieces:
        return table
    return Group(table, Text("\nThe last answer:", "dim"), tint(turn.pieces))


def stats_table(stats: Stats) -> Table:
    """Return the numbers of one request; definitions are those of hybrid/metrics.py."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(justify="right")
    kinds = f"{stats.num_draft_forwards} draft, {stats.num_verify_forwards} verify"
    length = f"{stats.acceptance_length:.2f}"
    rate = f"{stats.acceptance_rate:.1%} ({stats.num_accepted}/{stats.num_drafted})"
    if stats.num_denoise_forwards:
        kinds += f", {stats.num_denoise_forwards} denoising"
        length = rate = "-"
    histogram = " ".join(f"{n}:{count}" for n, count in enumerate(stats.acceptance_histogram))
    extras = {}
    if len(stats.forwards_by_mode) > 1:
        by_mode = sorted(stats.forwards_by_mode.items(), key=lambda item: -item[1])
        extras["by mode"] = ", ".join(f"{count} {mode}" for mode, count in by_mode)
    if stats.num_unverified and not stats.num_denoise_forwards:
        share = stats.num_unverified_disagreeing / stats.num_unverified
        extras["unverified"] = f"{stats.num_unverified} tokens, {share:.1%} disagree with AR"
    for name, value in {
        "prompt tokens": str(stats.num_prompt_tokens),
        "new tokens": str(stats.num_new_tokens),
        "forwards": f"{stats.num_forwards} ({stats.num_prefill_forwards} prefill, {kinds})",
        **extras,
        "tokens per forward": f"{stats.tokens_per_forward:.2f}",
        "acceptance length": length,
        "acceptance rate": rate,
        "accepted per step": histogram or "-",
        "tokens per second": f"{stats.tokens_per_second:.1f}",
        "time to first token": f"{stats.ttft_ms:.0f} ms",
        "time per token": f"{stats.tpot_ms:.1f} ms",
        "total": f"{stats.seconds:.2f} s",
        "in forwards": f"{stats.forward_seconds:.2f} s",
        "peak memory": f"{stats.peak_memory_mib:.0f} MiB",
    }.items():
        table.add_row(name, value)
    return table
