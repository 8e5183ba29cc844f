"""How pictures are drawn: colours that colour-blind readers tell apart, text of others as text, nothing clipped.

Matplotlib is imported where something is drawn. `tests/docs/test_pictures.py` simulates the three kinds of
colour-blindness: colours that are drawn together are at least `APART` from each other in CIE Lab, in each of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

APART = 18.0  # CIE76
NEUTRAL = "#6B7280"  # what others are compared with
COLORS = ("#0072B2", "#8C510A", "#CCBB44", "#332288", "#56B4E9", "#F4A582", "#690000")  # on white
ON_DARK = ("#118AB2", "#E5B73B", "#EF476F", "#A3E4B7", "#E0A0FF", "#B24D2A", "#D9F0A3")  # the page at night
NEUTRAL_ON_DARK = "#9AA3AF"
# Beside the colour: lines by their dashes and marks, areas by their hatches.
DASHES: tuple[Any, ...] = (
    "-",
    (0, (6, 2)),
    (0, (2, 1.5)),
    (0, (6, 2, 1.5, 2)),
    (0, (8, 3)),
    (0, (1, 1)),
    (0, (4, 1, 1, 1, 1, 1)),
)
MARKS = ("o", "s", "^", "D", "v", "P", "X")
HATCHES = ("", "//", "..", "\\\\", "xx", "--", "++")


def look(place: int) -> dict[str, Any]:
    """Colour, dashes and mark of the n-th line beside the neutral one; after seven they come again."""
    n = place % len(COLORS)
    return {"color": COLORS[n], "linestyle": DASHES[n], "marker": MARKS[n]}


P = ParamSpec("P")
T = TypeVar("T")


def plain_text(draw: Callable[P, T]) -> Callable[P, T]:
    """Text between dollar signs is no formula: names of runs and options come from others."""

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> T:
        import matplotlib

        with matplotlib.rc_context({"text.parse_math": False}):
            return draw(*args, **kwargs)

    return drawn


def new_figure(width_in: float, height_in: float, *, dpi: int = 120) -> Figure:
    """A white figure that makes room for its labels. No pyplot: it keeps figures alive and asks for a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), dpi=dpi, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def clipped(figure: Figure) -> list[str]:
    """The visible texts of a figure that do not lie inside its canvas."""
    from matplotlib.text import Text

    figure.draw_without_rendering()
    canvas = figure.get_figure().bbox
    outside, not_drawn = [], set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        not_drawn |= {id(tick.label1) for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high}
    for text in figure.findobj(Text):
        if not (isinstance(text, Text) and text.get_visible() and text.get_text().strip()):
            continue
        box = text.get_window_extent()
        if id(text) in not_drawn:
            continue
        if text.axes is not None and not text.axes.get_visible():
            continue
        if box.x0 < -1 or box.y0 < -1 or box.x1 > canvas.x1 + 1 or box.y1 > canvas.y1 + 1:
            outside.append(text.get_text())
    return outside
