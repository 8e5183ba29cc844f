"""How pictures look: colours that colour-blind readers tell apart, text of others as text, one style for all of them.

Matplotlib is imported where something is drawn. `tests/docs/test_pictures.py` simulates the three kinds of
colour-blindness: colours that are drawn together are at least `APART` from each other in CIE Lab, in each of them.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from markupsafe import Markup

from sidestream.tracking.untrusted import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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

PX = 108  # of the page in an inch of a chart: text of 8 points is 12 px high
INK, SOFT, RULE = "#16191D", "#59616B", "#DFE3E8"
# Names of the page's colours -> by day and at night; a chart on the page is drawn in those by day.
DAY = {"ink": INK, "soft": SOFT, "rule": RULE} | {
    f"arm-{n}": color for n, color in enumerate((NEUTRAL, *COLORS))
}
NIGHT = {"ink": "#E8EAED", "soft": "#A1A9B3", "rule": "#333A43"} | {
    f"arm-{n}": color for n, color in enumerate((NEUTRAL_ON_DARK, *ON_DARK))
}
_STYLE: Any = {
    "text.parse_math": False,  # text between dollar signs is no formula: names of runs come from others
    "svg.fonttype": "none",
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.titlesize", "axes.labelsize", "figure.titlesize"), 9),
    **dict.fromkeys(("font.size", "xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 8),
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "axes.edgecolor": SOFT,
    "grid.color": RULE,
}


def look(place: int) -> dict[str, Any]:
    """Colour, dashes and mark of the n-th line beside the neutral one; after seven they come again."""
    n = place % len(COLORS)
    return {"color": COLORS[n], "linestyle": DASHES[n], "marker": MARKS[n]}


P = ParamSpec("P")
T = TypeVar("T")


def styled(draw: Callable[P, T]) -> Callable[P, T]:
    """Whatever is drawn in the function looks like every other picture."""

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> T:
        import matplotlib

        with matplotlib.rc_context(_STYLE):
            return draw(*args, **kwargs)

    return drawn


def new_figure(width_in: float, height_in: float, *, dpi: int = 120) -> Figure:
    """A white figure that makes room for its labels. No pyplot: it keeps figures alive and asks for a display."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width_in, height_in), dpi=dpi, layout="constrained", facecolor="white")


def png(figure: Figure) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart inside a page, drawn for wide and for narrow windows, as text must not shrink.

    Attributes:
        alt: What it shows, in words.
        wide, narrow: SVG whose colours are those of the page, by day and at night.
    """

    alt: str
    wide: Markup
    narrow: Markup


@styled
def chart(
    draw: Callable[[Axes], object], *, alt: str, wide: tuple[int, int], narrow: tuple[int, int]
) -> Chart:
    """Draws a chart in both sizes.

    Args:
        wide, narrow: Width and height in px.
    """
    import matplotlib

    drawn = []
    for width, height in (wide, narrow):
        figure = new_figure(width / PX, height / PX)
        draw(figure.subplots())
        buffer = BytesIO()
        # The parts of a picture have names, which must not be those of another one in the page.
        with matplotlib.rc_context({"svg.hashsalt": f"{alt} {width}"}):
            nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
            figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
        text = printable(buffer.getvalue().decode(), limit=sys.maxsize, keep="\n")
        text = re.sub(r' xmlns(:xlink)?="[^"]*"|(?<=<g) id="[^"]*"', "", text[text.index("<svg") :])
        for name, color in DAY.items():
            text = text.replace(f": {color.lower()}", f": var(--{name})")
        drawn.append(Markup(text))
    return Chart(alt=alt, wide=drawn[0], narrow=drawn[1])
