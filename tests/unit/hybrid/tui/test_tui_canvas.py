"""The view of an answer that is being denoised, on consoles of a fixed size."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.style import Style
from rich.text import Text

from hybrid.tui import render
from hybrid.tui.canvas import COLOURLESS, SHADES, shades_for, slots_text
from hybrid.tui.turn import Turn
from hybrid.types import Mode, RowStep, Slot, Source, Stats, StepRecord, StreamEvent

WORDS = ["The ", "sky ", "is ", "blue", "\x1b[2J", "", "\n"]
END = 5  # a token without text


def console(width: int = 80, height: int = 24, *, system: str | None = "256", **more) -> Console:
    return Console(
        width=width,
        height=height,
        file=io.StringIO(),
        force_terminal=True,
        color_system=system,
        highlight=False,
        **{"_environ": {}, **more},
    )


def shown(slots: list[tuple[int | None, float]], shades=SHADES) -> Text:
    found = [Slot(i, token, sure) for i, (token, sure) in enumerate(slots)]
    return slots_text(found, lambda t: WORDS[t], shades, masked="░", blank="∎")


def filling(tokens: list[int], slots: list[int | None], start: int = 10) -> Turn:
    """An answer to 10 prompt tokens: some are final, and from `start` on `slots` are worked on."""
    turn = Turn("llada", 1000, 10, lambda ids: "".join(WORDS[i] for i in ids))
    sources = (Source.DIFFUSION_ONLY,) * len(tokens)
    found = tuple(Slot(start + i, t, 0.0 if t is None else 0.9) for i, t in enumerate(slots))
    row = RowStep(0, tuple(tokens), sources, slots=found)
    record = StepRecord(Mode.DIFFUSION, (row,), num_verify_forwards=0, num_denoise_forwards=1)
    pieces = tuple((WORDS[t], Source.DIFFUSION_ONLY) for t in tokens)
    turn.add(StreamEvent("".join(p for p, _ in pieces), pieces, record))
    return turn


def frame(turn: Turn, target: Console) -> list[str]:
    lines = target.render_lines(render.live_frame(turn, target), pad=False)
    return ["".join(s.text for s in line if not s.control).rstrip() for line in lines]


def luminance(shade: str) -> float:
    colour = Style.parse(shade).color
    assert colour is not None
    channels = [c / 255 for c in colour.get_truecolor()]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_shades_are_legible_on_black_and_on_white_and_rise() -> None:
    found = [luminance(shade) for shade in SHADES]
    assert found == sorted(set(found))
    for own in found:
        assert (own + 0.05) / 0.05 >= 3
        assert 1.05 / (own + 0.05) >= 3


def test_slots_stand_in_their_places_the_surer_the_brighter() -> None:
    text = shown([(0, 0.0), (None, 0.0), (2, 0.5), (3, 1.0)])
    assert text.plain == "The ░is blue"
    assert [str(span.style) for span in text.spans] == [SHADES[0], "dim", SHADES[2], SHADES[3]]
    sure = [shown([(0, share)]).spans[0].style for share in (0, 0.24, 0.25, 0.49, 0.74, 0.76)]
    assert sure == [SHADES[i] for i in (0, 0, 1, 1, 2, 3)]


def test_a_token_without_text_has_a_mark_and_controls_are_shown_not_obeyed() -> None:
    assert shown([(END, 1.0), (4, 1.0)]).plain == "∎␛[2J"
    assert shown([]).plain == ""


def test_without_colours_attributes_tell_the_confidence() -> None:
    assert shades_for(console()) == SHADES
    for target in (console(system=None), console(_environ={"NO_COLOR": "1"})):
        assert shades_for(target) == COLOURLESS
    styles = [Style.parse(shade) for shade in COLOURLESS]
    assert all(style.color is None for style in styles)
    assert len({(style.dim, style.bold) for style in styles}) == len(COLOURLESS)


def test_only_slots_behind_the_final_text_are_shown() -> None:
    turn = filling([0, 1], [0, 1, None, 3], start=10)
    assert [(s.position, s.token) for s in turn.slots] == [(12, None), (13, 3)]
    assert frame(turn, console())[0] == "The sky ░blue"
    behind = filling([], [None, 3], start=30)  # whatever the block begins with
    assert frame(behind, console())[0] == "░blue"
    assert Turn("llada").slots == ()


def test_the_view_ends_with_the_answer() -> None:
    turn = filling([0], [0, None])
    assert frame(turn, console())[0] == "The ░"
    row = RowStep(0, (1,), (Source.DIFFUSION_ONLY,))
    record = StepRecord(Mode.DIFFUSION, (row,), num_verify_forwards=0)
    turn.add(StreamEvent("sky ", (("sky ", Source.DIFFUSION_ONLY),), record))
    assert frame(turn, console())[0] == "The sky"


@pytest.mark.parametrize("width", [1, 2, 7, 40])
@pytest.mark.parametrize("height", [1, 2, 5, 24])
@pytest.mark.parametrize("system", ["256", None])
def test_the_frame_never_exceeds_the_terminal(width: int, height: int, system) -> None:
    target = console(width, height, system=system)
    for slots in ([None] * 500, [3, None, 0, 6] * 100, [END] * 50):
        lines = frame(filling([0, 1, 2] * 20, slots, start=70), target)
        assert len(lines) <= max(height - 1, 1)
        assert all(len(line) <= width for line in lines)


def test_where_a_long_canvas_does_not_fit_its_beginning_is_shown() -> None:
    text = [0, 1, 2] * 20  # 11 lines of 20 columns
    lines = frame(filling(text, [3] + [None] * 900, start=70), console(20, 15))
    assert lines[:3] == ["sky is The sky is", "blue" + "░" * 16, "░" * 20]
    assert sum("░" in line for line in lines) > 5
    # One that fits stands at the end of the text.
    lines = frame(filling(text, [3] + [None] * 30, start=70), console(20, 15))
    assert any("blue░" in line for line in lines)
    assert sum(line.count("░") for line in lines) == 30


def test_an_encoding_without_blocks_gets_other_marks() -> None:
    ascii_only = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"), width=40, height=9)
    assert frame(filling([0], [0, None, END]), ascii_only)[0] == "The _$"


def test_status_and_table_count_denoising_forwards() -> None:
    turn = filling([0], [0, None])
    assert "| 1 denoising | TPF 1.00 |" in render.status(turn, 200).plain
    assert "acceptance" not in render.status(turn, 200).plain
    stats = Stats(num_forwards=9, num_prefill_forwards=1, num_denoise_forwards=8)
    target = console(system=None)
    target.print(render.stats_table(stats))
    table = " ".join(target.file.getvalue().split())
    assert "forwards 9 (1 prefill, 0 draft, 0 verify, 8 denoising)" in table
    assert "acceptance length -" in table


def test_legend_explains_the_marks() -> None:
    target = console(system=None)
    target.print(render.legend())
    assert "slots: masked, and filled, the surer the brighter" in target.file.getvalue()
