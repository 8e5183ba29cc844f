"""The charts of a comparison, for its picture and for its page: losses, speeds, differences; the load of an arm."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sidestream.compare.arms import Comparison
from sidestream.compare.figures import Figures
from sidestream.report.charts import NEUTRAL, look, new_figure, png, styled
from sidestream.report.table import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WRAP = 56  # characters of a title above the narrow pictures
LONGEST = 40  # characters of an arm's name; the table has all of them
ENTRY_IN = 3.3  # of a legend, with such a name


def has_loss(all_figures: Sequence[Figures]) -> bool:
    return any(curve.tokens for of in all_figures for curve in of.curves.values())


def has_speed(all_figures: Sequence[Figures]) -> bool:
    return any(of.flat["tokens_per_second"] for of in all_figures)


def has_difference(all_figures: Sequence[Figures]) -> bool:
    return any(of.differences["val_loss"] is not None for of in all_figures)


def looks(comparison: Comparison) -> dict[str, dict[str, Any]]:
    """Name of an arm -> colour, dashes and mark; the baseline is grey."""
    others = [arm.name for arm in comparison.arms if arm is not comparison.baseline]
    found = {name: look(place) for place, name in enumerate(others)}
    return {**found, comparison.baseline.name: {"color": NEUTRAL, "linestyle": "--", "marker": "o"}}


def short(of: Figures) -> str:
    label = of.arm.label
    return label if len(label) <= LONGEST else f"{label[: LONGEST - 1]}…"


@styled
def picture(comparison: Comparison, all_figures: Sequence[Figures]) -> Figure:
    """compare.png: loss curves; beside them tokens per second and the differences of the loss."""
    figure = new_figure(12.0, max(5.0, 1.8 + 0.6 * len(all_figures)))
    grid = figure.add_gridspec(2, 2, width_ratios=(3, 2))
    seeds = min((d.n for of in all_figures if (d := of.differences["val_loss"])), default=0)
    proof = "95 % interval" if seeds > 1 else "one seed: proves nothing"
    ratios = "tokens/s over the baseline's: median of the seeds, smallest to largest; separate runs"
    minus = f"validation loss minus baseline, paired by seed; {proof}"
    seeds_of = "thin: training; band: lowest to highest seed"
    for place, draw, known, nothing, title in (
        (grid[:, 0], losses, has_loss(all_figures), "no loss was recorded", seeds_of),
        (grid[0, 1], speeds, has_speed(all_figures), "no speed was recorded", ratios),
        (grid[1, 1], differences, has_difference(all_figures), "no loss at equal tokens", minus),
    ):
        axes = figure.add_subplot(place)
        if known:
            draw(axes, comparison, all_figures)
            axes.set_title(textwrap.fill(title, WRAP))
        else:
            axes.axis("off")
            axes.text(0.5, 0.5, nothing, ha="center", va="center", transform=axes.transAxes)
    figure.suptitle(textwrap.fill(comparison.title, 110), fontsize=11, x=0.01, ha="left")
    return figure


def losses(axes: Axes, comparison: Comparison, all_figures: Sequence[Figures]) -> None:
    """Validation loss over tokens, a line per arm in a band of its seeds, and the training loss, thin.

    Without a validation the training loss is the line.
    """
    from matplotlib.ticker import EngFormatter

    look_of = looks(comparison)
    validated = any(of.curves["val_loss"].tokens for of in all_figures)
    for of in all_figures:
        thick, thin = of.curves["val_loss"], of.curves["train_loss"]
        thick = thick if validated else thin
        # The baseline, dashed, over the others: an arm with the same loss stays visible below it.
        drawn = {"zorder": 3 if of.flat["baseline"] else 2, **look_of[of.arm.name]}
        axes.plot(thick.tokens, thick.mean, label=short(of), linewidth=1.8, markersize=3, **drawn)
        color = drawn["color"]
        axes.fill_between(thick.tokens, thick.low, thick.high, color=color, alpha=0.15, linewidth=0)
    axes.margins(y=0.06)
    shown = axes.get_ylim()
    if validated:
        for of in all_figures:
            thin, color = of.curves["train_loss"], look_of[of.arm.name]["color"]
            axes.plot(thin.tokens, thin.mean, color=color, linewidth=0.8, alpha=0.4)
    axes.set_ylim(shown)
    axes.set_xlim(left=0)
    axes.set_xlabel("training tokens")
    axes.set_ylabel(f"{'validation' if validated else 'training'} loss, nats per token")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(True)
    figure: Any = axes.figure
    columns = max(1, int(figure.get_figwidth() / ENTRY_IN))
    figure.legend(loc="outside lower left", ncols=min(columns, len(all_figures)))


def speeds(axes: Axes, comparison: Comparison, all_figures: Sequence[Figures]) -> None:
    """A bar per arm, its speed over the baseline's; a line from the smallest to the largest ratio of the seeds.

    Bar, line and label are the same numbers. Without a ratio there is no bar, and the label says why.
    """
    look_of = looks(comparison)
    for place, of in enumerate(all_figures):
        ratio, low, high = of.speed_ratio
        axes.barh(place, ratio or 0.0, height=0.45, color=look_of[of.arm.name]["color"])
        if low is not None and high is not None:
            axes.plot([low, high], [place, place], color="0.15", linewidth=1.2)
        end = max(ratio or 0.0, high or 0.0)
        said = (
            f"{number(of.flat['tokens_per_second'])} tokens/s"
            if of.flat["baseline"]
            else of.ratio_text or "-"
        )
        axes.annotate(said, (end, place), xytext=(4, 0), textcoords="offset points", va="center")
    axes.axvline(1.0, color="0.4", linewidth=1, linestyle=":")
    axes.set_xlim(0, 2.0 * max(1.0, *(of.speed_ratio[2] or 0.0 for of in all_figures)))
    name_rows(axes, all_figures)


def differences(axes: Axes, comparison: Comparison, all_figures: Sequence[Figures]) -> None:
    """A point and an interval per arm beside a line at zero: validation loss minus that of the baseline."""
    rows = [(of, found) for of in all_figures if (found := of.differences["val_loss"]) is not None]
    axes.axvline(0.0, color="0.4", linewidth=1)
    for place, (of, found) in enumerate(rows):
        drawn = looks(comparison)[of.arm.name]
        if found.low is not None and found.high is not None:
            axes.plot([found.low, found.high], [place, place], color=drawn["color"], linewidth=2)
        axes.plot([found.mean], [place], drawn["marker"], color=drawn["color"], markersize=6)
    axes.grid(True, axis="x")
    name_rows(axes, [of for of, _ in rows])


def name_rows(axes: Axes, rows: Sequence[Figures]) -> None:
    """Names above the rows: beside them there is no room in a narrow window."""
    for place, of in enumerate(rows):
        axes.text(0, place - 0.26, short(of), va="bottom", transform=axes.get_yaxis_transform())
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_ylim(len(rows) - 0.6, -0.75)


@styled
def load_map(records: Sequence[dict[str, Any]]) -> bytes:
    """A small heat map of the experts' load as PNG, on the scale of expert_load.png.

    Args:
        records: of expert_load.jsonl, at least one, with counts.
    """
    from sidestream.tracking import expert_load

    figure = expert_load.draw(list(records))
    figure.set_size_inches(5.6, max(3.2, min(4.0, 0.62 * float(figure.get_figheight()) + 1.0)))
    return png(figure)
