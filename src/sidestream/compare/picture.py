"""Pictures by matplotlib: compare.png, and the load of each arm for the page. Imported where they are drawn."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

from sidestream.compare.arms import Comparison
from sidestream.compare.charts import short_name, speed_label, speed_ratio
from sidestream.compare.figures import Figures
from sidestream.tracking.drawing import NEUTRAL, look, new_figure, plain_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WRAP = 56  # characters of a title above the narrow pictures


def looks(comparison: Comparison) -> dict[str, dict[str, Any]]:
    """Name of an arm -> colour, dashes and mark; the baseline is grey."""
    others = [arm.name for arm in comparison.arms if arm is not comparison.baseline]
    found = {name: look(place) for place, name in enumerate(others)}
    return {**found, comparison.baseline.name: {"color": NEUTRAL, "linestyle": "--", "marker": "o"}}


@plain_text
def draw(comparison: Comparison, all_figures: Sequence[Figures]) -> Figure:
    """Loss curves with the spread of the seeds; beside them tokens per second and the differences of the loss."""
    figure = new_figure(12.0, max(5.0, 1.8 + 0.6 * len(all_figures)))
    grid = figure.add_gridspec(2, 2, width_ratios=(3, 2))
    color = looks(comparison)
    _draw_losses(figure.add_subplot(grid[:, 0]), all_figures, color)
    _draw_speed(figure.add_subplot(grid[0, 1]), all_figures, color)
    _draw_differences(figure.add_subplot(grid[1, 1]), all_figures, color)
    title = "\n".join(textwrap.wrap(comparison.title, 110))
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    return figure


def png(figure: Figure) -> bytes:
    buffer = BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _named(of: Figures) -> str:
    return short_name(of.arm) + (" †" if of.arm.changes_model else "")


def _bare(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)


def _nothing(axes: Axes, what: str) -> None:
    axes.axis("off")
    axes.text(0.5, 0.5, what, ha="center", va="center", fontsize=9, color="0.4", transform=axes.transAxes)


def _draw_losses(axes: Axes, all_figures: Sequence[Figures], color: dict[str, dict[str, Any]]) -> None:
    from matplotlib.ticker import EngFormatter

    shown = "val_loss" if any(of.curves["val_loss"].tokens for of in all_figures) else "train_loss"
    if not any(of.curves[shown].tokens for of in all_figures):
        return _nothing(axes, "no loss was recorded")
    for of in all_figures:
        curve, name = of.curves[shown], of.arm.name
        axes.plot(
            curve.tokens,
            curve.mean,
            zorder=3 if of.flat["baseline"] else 2,  # an arm with the same loss stays visible below it
            **color[name],
            linewidth=1.8,
            markersize=3,
            label=_named(of),
        )
        axes.fill_between(
            curve.tokens, curve.low, curve.high, color=color[name]["color"], alpha=0.15, linewidth=0
        )
    axes.set_xlabel("training tokens", fontsize=9)
    what = "validation" if shown == "val_loss" else "training"
    axes.set_ylabel(f"{what} loss, nats per token (band: all seeds)", fontsize=9)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(True, color="0.92")
    _bare(axes)
    axes.legend(frameon=False, fontsize=8)
    return None


def _draw_speed(axes: Axes, all_figures: Sequence[Figures], color: dict[str, dict[str, Any]]) -> None:
    if not any(of.flat["tokens_per_second"] for of in all_figures):
        return _nothing(axes, "no speed was recorded")
    for place, of in enumerate(all_figures):
        ratio, low, high = speed_ratio(of)
        axes.barh([place], [ratio or 0.0], color=color[of.arm.name]["color"])
        if low is not None and high is not None:
            axes.plot([low, high], [place, place], color="0.15", linewidth=1.2)
        end = max(ratio or 0.0, high or 0.0)
        text = speed_label(of)
        axes.annotate(text, (end, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.axvline(1.0, color="0.4", linewidth=1, linestyle=":")
    axes.set_xlim(
        0, 2.0 * max([1.0, *(high for of in all_figures if (high := speed_ratio(of)[2]) is not None)])
    )
    _rows(axes, all_figures)
    _title(axes, "tokens/s over the baseline's: median of the seeds, smallest to largest; separate runs")
    return None


def _draw_differences(axes: Axes, all_figures: Sequence[Figures], color: dict[str, dict[str, Any]]) -> None:
    rows = [of for of in all_figures if of.differences["val_loss"] is not None]
    if not rows:
        return _nothing(axes, "no loss at equal tokens")
    axes.axvline(0.0, color="0.4", linewidth=1)
    for place, of in enumerate(rows):
        found: Any = of.differences["val_loss"]
        drawn = color[of.arm.name]
        if found.low is not None:
            axes.plot([found.low, found.high], [place, place], color=drawn["color"], linewidth=2)
        axes.plot([found.mean], [place], drawn["marker"], color=drawn["color"], markersize=6)
    _rows(axes, rows)
    pairs = rows[0].differences["val_loss"]
    interval = "95 % interval" if pairs is not None and pairs.low is not None else "one seed: proves nothing"
    _title(axes, f"validation loss minus baseline, paired by seed; {interval}")
    axes.grid(True, axis="x", color="0.92")
    return None


def _title(axes: Axes, text: str) -> None:
    axes.set_title(textwrap.fill(text, WRAP), fontsize=9, loc="left")


def _rows(axes: Axes, rows: Sequence[Figures]) -> None:
    axes.set_yticks(range(len(rows)), [textwrap.fill(_named(of), 28) for of in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    _bare(axes)


def load_map(records: Sequence[dict[str, Any]]) -> bytes:
    """A small heat map of the experts' load as PNG, on the scale of expert_load.png.

    Args:
        records: of expert_load.jsonl, at least one, with counts.
    """
    from sidestream.tracking import expert_load

    figure = expert_load.draw(list(records))
    figure.set_size_inches(5.6, max(2.2, min(4.0, 0.62 * float(figure.get_figheight()) + 1.0)))
    return png(figure)
