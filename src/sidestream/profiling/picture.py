"""The picture of a measurement: what each rank computed and what travelled meanwhile, serial above, overlapped below.

Nothing is drawn that was not recorded: each bar is one entry of `overlap.json`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sidestream.profiling.bench import ARMS, SHOWN, Measured
from sidestream.profiling.spans import COMPUTE, REST, WIRE, Bar
from sidestream.report.charts import COLORS, NEUTRAL
from sidestream.report.statistics import summarize
from sidestream.tracking.folder import write_bytes_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Part or tag -> colour, hatch, text of the legend. Blue hides, yellow waits for rows, red and brown travel; kin
# differ in their hatches.
_BLUE, _BROWN, _YELLOW, _INDIGO, _SKY, _PEACH, _RED = COLORS
LOOKS = {
    "attention": (_BLUE, "", "attention"),
    "attention_before": (_BLUE, "//", "attention of the dense block"),
    "feed_forward": (_SKY, "", "feed-forward of the dense block"),
    "shared": (_INDIGO, "", "shared expert"),
    "shared_up": (_INDIGO, "", "shared expert, first half"),
    "shared_down": (_INDIGO, "//", "shared expert, second half"),
    "experts": (_YELLOW, "", "experts"),
    "weight_gradients": (_YELLOW, "//", "experts' weight gradients"),
    "router": (NEUTRAL, "", "router"),
    REST: (NEUTRAL, "..", "rest: packing, sums, norms"),
    "dispatch": (_RED, "", "dispatch"),
    "combine": (_PEACH, "", "combine"),
    "metadata": (_BROWN, "//", "counts, ids, weights"),
}
SHORT = {
    "attention_before": "attention",
    "feed_forward": "feed-forward",
    "weight_gradients": "wgrad",
    "shared_up": "shared",
    "shared_down": "shared",
}
WIDTH_IN, LANE_IN = 13.0, 0.36
MOST_RANKS = 4  # drawn; the JSON has them all
CHARACTER_IN = 0.07  # of a label
LINE = 175  # characters of the title that fit


def looks(name: str) -> tuple[str, str, str]:
    """Colour, hatch and legend of a part or a tag; a tag with a dot is metadata."""
    return LOOKS.get(name) or LOOKS["metadata" if "." in name else REST]


def timeline(
    ranks: Sequence[Sequence[Sequence[Bar]]], *, passes: Sequence[str], seconds: Sequence[float]
) -> dict[str, Any]:
    """The part of overlap.json that is drawn, of one arm: passes one after another.

    Args:
        ranks: Rank -> pass -> bars, in seconds since the pass began.
        passes: Names.
        seconds: Length of each pass, slowest rank; the next pass is put behind it.
    """
    begins = [sum(seconds[:number]) for number in range(len(passes))]
    return {
        "ms": 1e3 * sum(seconds),
        "passes": [
            {"name": name, "begin_ms": 1e3 * begin, "end_ms": 1e3 * (begin + length)}
            for name, begin, length in zip(passes, begins, seconds)
        ],
        "ranks": [
            [
                {
                    "lane": bar.lane,
                    "name": bar.name,
                    "pass": name,
                    "begin_ms": round(1e3 * (bar.begin + begin), 4),
                    "end_ms": round(1e3 * (bar.end + begin), 4),
                }
                for name, begin, bars in zip(passes, begins, rank)
                for bar in bars
            ]
            for rank in ranks
        ],
    }


def both_arms(measured: Measured, ranks: Sequence[Any]) -> dict[str, Any]:
    """`serial` and `overlapped` of the round that is shown.

    Args:
        measured: On the rank that draws.
        ranks: Rank -> the bars of `SHOWN`, see `Measured.bars`.
    """
    arms: dict[str, Any] = {}
    arms["median_ms"] = {arm: summarize(measured.milliseconds(arm))["median"] for arm in SHOWN}
    for place, arm in enumerate(SHOWN):
        seconds = measured.seconds[measured.shown_round, ARMS.index(arm)].tolist()
        arms[arm] = timeline([of_rank[place] for of_rank in ranks], passes=measured.passes, seconds=seconds)
    return arms


def draw(picture: dict[str, Any]) -> Figure:
    """Draw the entry `picture` of overlap.json: `title` (lines), and `serial` and `overlapped` (see `timeline`)."""
    # No pyplot: it keeps figures alive and asks for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    arms = ("serial", "overlapped")
    num_ranks = min(MOST_RANKS, len(picture["serial"]["ranks"]))
    panel_in = LANE_IN * (2 * num_ranks + 0.6 * num_ranks) + 0.25
    first, *others = [part for line in picture["title"] for part in textwrap.wrap(line, LINE) or [""]]
    head_in, foot_in, between_in = 0.2 * (1 + len(others)) + 0.6, 1.1, 0.75
    height_in = head_in + 2 * panel_in + between_in + foot_in
    figure = Figure(figsize=(WIDTH_IN, height_in), dpi=120, facecolor="white")
    FigureCanvasAgg(figure)
    left, width = 1.25 / WIDTH_IN, (WIDTH_IN - 1.25 - 0.95) / WIDTH_IN
    longest = max(picture[arm]["ms"] for arm in arms)
    for number, arm in enumerate(arms):
        bottom = foot_in + (1 - number) * (panel_in + between_in)
        axes = figure.add_axes((left, bottom / height_in, width, panel_in / height_in))
        _draw_arm(axes, picture[arm], num_ranks=num_ranks, inch_ms=longest / (width * WIDTH_IN))
        axes.set_xlim(0, longest)
        axes.set_title(_heading(picture, arm), loc="left", fontsize=11, fontweight="bold", pad=14)
        if number == 1:
            axes.set_xlabel("milliseconds since the pass began on all ranks", fontsize=9)
    figure.text(
        0.12 / WIDTH_IN, 1 - 0.08 / height_in, first, va="top", fontsize=12, fontweight="bold", color="0.1"
    )
    for number, line in enumerate(others):
        top = 0.32 + 0.2 * number
        figure.text(0.12 / WIDTH_IN, 1 - top / height_in, line, va="top", fontsize=8.5, color="0.25")
    _legend(figure, picture, height_in)
    return figure


def _heading(picture: dict[str, Any], arm: str) -> str:
    """Medians of all rounds where they are known, as in every table; the bars are of one round."""
    medians = picture.get("median_ms") or {name: picture[name]["ms"] for name in SHOWN}
    text = f"{arm}  {medians[arm]:.1f} ms"
    if "median_ms" in picture:
        text += f" (median; the round shown: {picture[arm]['ms']:.1f})"
    if arm == "overlapped" and medians["overlapped"] > 0:
        text += f"   ({medians['serial'] / medians['overlapped']:.2f} x)   {picture['figures']}"
    return text


def _draw_arm(axes: Axes, timeline: dict[str, Any], *, num_ranks: int, inch_ms: float) -> None:
    """One panel: two lanes per rank.

    Args:
        inch_ms: Milliseconds per inch, to know which label fits.
    """
    ticks, names = [], []
    for rank in range(num_ranks):
        for lane, place in ((COMPUTE, 2.6 * rank), (WIRE, 2.6 * rank + 1)):
            axes.axhspan(place - 0.42, place + 0.42, color="#F4F4F4", zorder=0)
            ticks.append(place)
            names.append(f"rank {rank}  {'compute' if lane == COMPUTE else 'wire'}")
            for bar in timeline["ranks"][rank]:
                if bar["lane"] == lane:
                    _draw_bar(axes, bar, place, inch_ms)
    axes.set_yticks(ticks, names, fontsize=9)
    axes.set_ylim(2.6 * num_ranks - 1.05, -0.55)
    for part in timeline["passes"]:
        axes.axvline(part["end_ms"], color="0.25", linewidth=1.0, linestyle=":", zorder=3)
        middle = (part["begin_ms"] + part["end_ms"]) / 2
        text = f"{part['name']} {part['end_ms'] - part['begin_ms']:.1f} ms"
        axes.annotate(
            text,
            (middle, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color="0.35",
        )
    axes.annotate(
        f"{timeline['ms']:.1f} ms",
        (timeline["ms"], 0.5),
        xycoords=("data", "axes fraction"),
        xytext=(5, 0),
        textcoords="offset points",
        fontsize=10,
        fontweight="bold",
        va="center",
        annotation_clip=False,
    )
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", color="0.88", linewidth=0.6, zorder=0.5)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw_bar(axes: Axes, bar: dict[str, Any], place: float, inch_ms: float) -> None:
    begin, length = bar["begin_ms"], bar["end_ms"] - bar["begin_ms"]
    color, hatch, _ = looks(bar["name"])
    edge: dict[str, Any] = {"color": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}
    axes.barh(place, length, left=begin, height=0.78, zorder=2, **edge)
    name = SHORT.get(bar["name"], bar["name"])
    if bar["name"] == REST or "." in bar["name"]:
        return
    room = length / inch_ms / CHARACTER_IN
    full = f"{name} {length:.1f}" if length < 99.5 else f"{name} {length:.0f}"
    text = full if room > len(full) else name if room > len(name) else ""
    dark = sum(int(color[i : i + 2], 16) * weight for i, weight in ((1, 0.3), (3, 0.59), (5, 0.11))) < 150
    axes.text(
        begin + length / 2,
        place,
        text,
        ha="center",
        va="center",
        fontsize=8,
        color="white" if dark else "black",
        zorder=4,
        clip_on=True,
    )


def _legend(figure: Figure, picture: dict[str, Any], height_in: float) -> None:
    from matplotlib.patches import Patch

    drawn = {
        looks(bar["name"])
        for arm in ("serial", "overlapped")
        for rank in picture[arm]["ranks"][:MOST_RANKS]
        for bar in rank
    }
    entries = [look for look in dict.fromkeys(LOOKS.values()) if look in drawn]
    figure.legend(
        handles=[
            Patch(facecolor=color, hatch=hatch, edgecolor="white", label=label)
            for color, hatch, label in entries
        ],
        loc="lower left",
        bbox_to_anchor=(0.12 / WIDTH_IN, 0.06 / height_in),
        ncols=-(-len(entries) // 2),
        fontsize=8.5,
        frameon=False,
        columnspacing=1.4,
        handlelength=1.2,
    )


def save(picture: dict[str, Any], folder: Path, *, stem: str = "overlap") -> list[Path]:
    """Write `<stem>.png` and `<stem>.svg`; return their paths."""
    figure, paths = draw(picture), []
    for kind in ("png", "svg"):
        buffer = BytesIO()
        figure.savefig(buffer, format=kind)
        paths.append(folder / f"{stem}.{kind}")
        write_bytes_atomic(paths[-1], buffer.getvalue())
    return paths
