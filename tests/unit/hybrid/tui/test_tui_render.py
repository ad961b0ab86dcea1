"""Pure rendering, on consoles of a fixed width."""

from __future__ import annotations

import dataclasses
import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style

from hybrid.tui import render
from hybrid.tui.text import clean
from hybrid.tui.turn import Turn
from hybrid.types import GenerationResult, Mode, RowStep, Source, Stats, StepRecord, StreamEvent

V, C, A = Source.DRAFT_VERIFIED, Source.CORRECTION, Source.AR


def console(width: int = 80, height: int = 24, *, colour: bool = False, **settings) -> Console:
    return Console(
        width=width,
        height=height,
        file=io.StringIO(),
        force_terminal=colour,
        color_system="256" if colour else None,
        theme=render.THEME,
        highlight=False,
        **settings,
    )


def show(content, width: int = 80, **settings) -> str:
    target = console(width, **settings)
    target.print(content)
    return target.file.getvalue()


def step(*pieces, drafted: int = 0, mode: Mode = Mode.SPECULATIVE) -> StreamEvent:
    sources = tuple(source for _, source in pieces)
    row = RowStep(0, tuple(range(len(pieces))), sources, drafted, sources.count(V))
    record = StepRecord(mode, (row,), num_draft_forwards=bool(drafted))
    return StreamEvent("".join(p for p, _ in pieces), tuple(pieces), record)


def turn_of(*events: StreamEvent, **fields) -> Turn:
    turn = Turn("speculative", 100, 10, **fields)
    for event in events:
        turn.add(event)
    return turn


EVENTS = (
    step(("One", A), mode=Mode.PREFILL),
    step((" two", V), (" three", V), (" four", C), drafted=4),
    step((" five", C), drafted=4),
)


@given(st.text(st.characters(), max_size=60))
def test_clean_text_holds_no_control_character(text: str) -> None:
    cleaned = clean(text)
    cleaned.encode("utf-8")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", cleaned)
    assert clean(cleaned) == cleaned


def test_clean_keeps_ordinary_text_and_shows_the_rest() -> None:
    assert clean("añ 漢字 👩\u200d🚀\n\ttab") == "añ 漢字 👩\u200d🚀\n\ttab"
    assert clean("\x1b[31m\x07\x7f\x9b") == "␛[31m␇␡\ufffd"
    assert clean("a\r\nb\rc") == "a\nbc"
    assert clean("\x1b") + clean("[31m") == clean("\x1b[31m")


def test_tint_marks_each_token_with_its_source() -> None:
    shown = show(
        render.tint([("a", A), ("b", V), ("c", C), ("d", Source.DIFFUSION_ONLY)]), colour=True
    )
    assert shown == "a\x1b[38;5;28mb\x1b[0m\x1b[1;38;5;166mc\x1b[0m\x1b[4;38;5;134md\x1b[0m\n"


@pytest.mark.parametrize("source", [V, C, Source.DIFFUSION_ONLY])
def test_tints_are_legible_on_black_and_on_white(source: Source) -> None:
    colour = Style.parse(render.TINTS[source]).color
    assert colour is not None
    channels = [c / 255 for c in colour.get_truecolor()]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    assert (luminance + 0.05) / 0.05 >= 3
    assert 1.05 / (luminance + 0.05) >= 3


def test_tints_stay_apart_with_sixteen_colours_and_without() -> None:
    styles = [Style.parse(render.TINTS[s]) for s in (A, V, C, Source.DIFFUSION_ONLY)]
    few = {s.color.downgrade(ColorSystem.STANDARD).number if s.color else None for s in styles}
    assert len(few) == 4
    attributes = {(s.bold, s.underline) for s in styles}
    assert len(attributes) == 3  # AR and verified drafts, the two ordinary kinds, share one


def test_markup_and_html_are_text() -> None:
    text = "[red]x[/red] List<int> <b>y</b> [link](http://z)"
    for content in (render.tint([(text, A)]), render.markdown(text)):
        shown = show(content)
        assert "[red]x[/red] List<int> <b>y</b>" in shown
        assert "http://z" in shown


def test_markdown_is_rendered_and_entities_cannot_smuggle_controls() -> None:
    shown = show(render.markdown("# T\n\n- **a**\n\n| h |\n|---|\n| c |\n\n&#27;[31m&#155;2J&#13;"))
    assert "• a" in shown
    assert "**" not in shown
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", shown)


def test_a_link_is_not_an_escape_sequence() -> None:
    assert "\x1b]8" not in show(render.markdown("[a](http://b)"), colour=True)


def test_strip_shows_drafted_against_accepted() -> None:
    assert render.strip([e.record for e in EVENTS], 40).plain == "· ▮▮▯▯ ▯▯▯▯"
    assert render.strip([e.record for e in EVENTS], 40, render.ASCII).plain == ". ##-- ----"
    assert render.strip([], 40).plain == ""


@pytest.mark.parametrize("width", [1, 5, 6, 10, 11, 12, 20, 40])
def test_strip_keeps_the_last_steps_that_fit(width: int) -> None:
    records = [e.record for e in EVENTS] * 10
    shown = render.strip(records, width)
    assert shown.cell_len <= width
    assert shown.plain.startswith("…")
    # As many as possible: one more (up to 5 cells) would not fit.
    assert shown.cell_len > width - 6


def test_strip_counts_when_a_step_is_too_wide() -> None:
    wide = step(*[("x", V)] * 7, ("y", C), drafted=16)
    assert render.strip([wide.record], 20).plain == "7/16"
    assert render.strip([wide.record], 80).plain == "▮" * 7 + "▯" * 9


def test_status_has_all_five_numbers_at_any_width() -> None:
    turn = turn_of(*EVENTS)
    stats = dataclasses.replace(turn.stats, tokens_per_second=41.23)
    turn.result = GenerationResult(turn.text, (1,), "stop", stats=stats)
    for width, num_lines in ((80, 1), (40, 3), (20, 5), (5, 5)):
        lines = render.status(turn, width).plain.split("\n")
        assert len(lines) == num_lines
        assert all(len(line) <= max(width, 18) for line in lines)
        joined = " | ".join(lines)
        assert re.fullmatch(
            r"speculative \| 41\.2 tok/s \| acceptance 2\.00 \| TPF 1\.00 \| context 15/100",
            joined,
        )


def test_status_names_the_mode_when_the_strategy_does_not() -> None:
    turn = turn_of(*EVENTS)
    turn.strategy = "hybrid"
    assert render.status(turn, 80).plain.startswith("hybrid (speculative) |")
    turn.result = GenerationResult(turn.text, (1,), "stop", stats=turn.stats)
    assert render.status(turn, 80).plain.startswith("hybrid |")


@pytest.mark.parametrize(
    ("width", "height"), [(80, 24), (40, 10), (20, 8), (20, 3), (10, 2), (1, 1)]
)
def test_live_frame_never_exceeds_the_terminal(width: int, height: int) -> None:
    turn = turn_of(*EVENTS * 30)
    target = console(width, height)
    lines = target.render_lines(render.live_frame(turn, target), pad=False)
    assert len(lines) <= max(height - 1, 1)
    shown = ["".join(s.text for s in line) for line in lines]
    assert all(len(line) <= width for line in shown)
    if height > 6:
        assert "five" in "".join(shown).replace(" ", "")


def test_live_frame_shows_the_tail_whatever_was_before() -> None:
    long = turn_of(
        step((f"{'first ' * 500}\n", A)), *[step((f"line {i}\n", V)) for i in range(200)]
    )
    target = console(40, 10)
    lines = target.render_lines(render.live_frame(long, target), pad=False)
    text = ["".join(s.text for s in line).rstrip() for line in lines]
    assert "line 199" in text
    assert "line 190" not in text
    # The long beginning is not wrapped again at every frame.
    assert sum(len(t) for t, _ in render._tail(long.pieces, 400)) < 600


def test_finished_answer_says_how_it_ended() -> None:
    target = console()
    turn = turn_of(*EVENTS)
    assert "[stopped]" in show(render.finished(turn, target))
    for reason, mark in (("length", True), ("stop", False)):
        turn.result = GenerationResult(turn.text, (1,), reason, stats=Stats())
        shown = show(render.finished(turn, target))
        assert "One two three four five" in shown
        assert "[stopped]" not in shown
        assert ("cut at the length limit" in shown) is mark


def test_legend_repeats_the_answer_in_colour() -> None:
    shown = show(render.legend(turn_of(*EVENTS)), colour=True)
    assert "\x1b[38;5;28m two three\x1b[0m" in shown
    assert "accepted by the verifier" in shown
    assert "last answer" not in show(render.legend())


def test_stats_table() -> None:
    stats = Stats(
        num_new_tokens=12,
        num_forwards=9,
        num_draft_forwards=4,
        num_verify_forwards=4,
        num_prefill_forwards=1,
        num_drafted=8,
        num_accepted=6,
        acceptance_length=2.75,
        acceptance_rate=0.75,
        acceptance_histogram=(1, 0, 3),
    )
    shown = re.sub(" +", " ", show(render.stats_table(stats)))
    assert "forwards 9 (1 prefill, 4 draft, 4 verify)" in shown
    assert "acceptance length 2.75" in shown
    assert "acceptance rate 75.0% (6/8)" in shown
    assert "accepted per step 0:1 1:0 2:3" in shown


def test_glyphs_follow_the_encoding() -> None:
    target = console()
    assert render.glyphs_for(target) == render.Glyphs()
    ascii_only = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert render.glyphs_for(ascii_only) == render.ASCII


def test_no_blanks_at_line_ends() -> None:
    shown = show(render.markdown("A paragraph.\n\n- item\n\n```\ncode\n```\n\n> quote"))
    assert all(line == line.rstrip() for line in shown.split("\n"))
    assert "code" in shown


def test_acceptance_is_not_shown_before_the_first_decode_step() -> None:
    assert "acceptance" not in render.status(turn_of(EVENTS[0]), 80).plain
