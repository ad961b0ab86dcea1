"""An answer that is being denoised: slots out of order, the surer the brighter.

Pure, as render.py is. Next: hybrid/tui/render.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

from hybrid.tui.text import clean
from hybrid.types import Slot

# From doubt to certainty: violets of rising brightness, each with a contrast of at least 3 : 1 on
# black and on white (a test computes it).
SHADES = ("color(92)", "color(98)", "color(135)", "bold color(171)")
COLOURLESS = ("dim", "", "bold")


def shades_for(console: Console) -> Sequence[str]:
    """Return styles for rising confidence that the console can show."""
    return COLOURLESS if console.no_color or console.color_system is None else SHADES


def slots_text(
    slots: Sequence[Slot],
    text_of: Callable[[int], str],
    shades: Sequence[str],
    *,
    masked: str,
    blank: str,
) -> Text:
    """Return slots as text, left to right.

    Args:
        slots: ascending positions.
        text_of: the text of one token.
        shades: styles for rising confidence, each for an equal share of [0, 1].
        masked: mark of a masked slot.
        blank: mark of a token without text, such as the end of the answer.
    """
    shown = Text()
    for slot in slots:
        if slot.token is None:
            shown.append(masked, "dim")
        else:
            shade = shades[min(int(slot.confidence * len(shades)), len(shades) - 1)]
            shown.append(clean(text_of(slot.token)) or blank, shade)
    return shown
