"""What all benchmarks share beside their rounds: the record of a measurement, what is told of it, and its bars.

A benchmark times its arms (`rounds.py`) and hands over plain numbers; everything behind that is here. No torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sidestream.measure import environment
from sidestream.report.charts import new_figure, png, styled
from sidestream.report.table import Table, console, notes, say, short_commit
from sidestream.tracking.folder import write_bytes_atomic, write_json_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console

SCHEMA_VERSION = 1
STATISTICS = ("min", "median")


def ratio(times: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    """One summary over another, by minimum and by median."""
    return {by: round(times[by] / other[by], 4) for by in STATISTICS}


def begin(benchmark: str, *, command: str, packages: tuple[str, ...] = ()) -> dict[str, Any]:
    """The head of a record. Taken before anything is timed: what happens to files and machine meanwhile is not it.

    Args:
        packages: Whose versions matter, beside those that every run records.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "benchmark": benchmark,
        "status": "finished",
        "command": command,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **environment.machine(),
        **environment.code(),
        "versions": environment.versions(packages),
        "load_average": {"before": list(os.getloadavg())},
    }


def end(head: dict[str, Any], **found: Any) -> dict[str, Any]:
    """The whole record: its head, the load behind the last round, and what was found."""
    return {**head, "load_average": {**head["load_average"], "after": list(os.getloadavg())}, **found}


def write(
    result: dict[str, Any],
    out: Path | None,
    show: Callable[[dict[str, Any], Console], None],
    draw: Callable[[dict[str, Any]], Figure] | None = None,
) -> None:
    """Writes the record, its picture beside it, and prints tables and paths; without `out` only the tables."""
    if out is None:
        return show(result, console())
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(out, result)
    paths = [out]
    if draw is not None:
        paths.append(out.with_suffix(".png"))
        write_bytes_atomic(paths[-1], png(draw(result)))
    show(result, console())
    print(*paths)
    return None


def pair(values: dict[str, float] | None, digits: int = 2) -> str:
    """Minimum / median; `-` where there is none."""
    return "-" if values is None else f"{values['min']:.{digits}f} / {values['median']:.{digits}f}"


def load(result: dict[str, Any]) -> str:
    """How busy the machine was."""
    before, after = (result["load_average"][when][0] for when in ("before", "after"))
    return f"Load average {before:.1f} before, {after:.1f} after."


def say_left_out(left_out: dict[str, str], to: Console) -> None:
    """Arms that were not timed, each with its reason."""
    for name, reason in left_out.items():
        say(f"left out: {name}: {reason}", to, style="yellow")


def facts(
    result: dict[str, Any],
    *,
    ranks: str = "one thread and core a rank",
    load_average: str = "",
    measured: str,
    emulated: str,
) -> list[str]:
    """What a reader must know beside the figures, each a sentence without its full stop."""
    if not load_average:
        load_average = "before " + ", ".join(f"{value:.1f}" for value in result["load_average"]["before"])
    precision = f", {result['precision']}" if "precision" in result else ""
    commit = f"{result['commit']}{'-dirty' if result['dirty'] else ''}"
    return [
        f"Command: `{result['command']}`",
        f"Machine: {result['cpu']}, {ranks}, torch {result['versions']['torch']}{precision}; load average "
        f"{load_average}",
        f"Commit `{short_commit(commit)}`; {measured}",
        f"Emulated: {emulated}",
    ]


def page(table: Table, said: Iterable[str]) -> str:
    """A table of a page in Markdown, and the facts under it."""
    return f"{table.markdown()}\n\n{notes(said)}"


def tick(axes: Axes, values: Sequence[float], *, label: str = "") -> None:
    """A mark on each bar, seen on dark ones too."""
    places = range(len(values))
    axes.plot(values, places, "|", color="white", markersize=13, markeredgewidth=3.5)
    axes.plot(values, places, "k|", markersize=11, markeredgewidth=1.2, label=label or None)


@styled
def bars(
    rows: Sequence[Sequence[dict[str, Any]]],
    draw: Callable[[Axes, dict[str, Any]], None],
    *,
    title: str,
    names: Callable[[dict[str, Any]], list[str]],
    width_in: float,
    height_in: float,
    legend: bool = False,
) -> Figure:
    """Bars below each other, an axes for each record; names where they are not those of the first in the row.

    Args:
        rows: Of records.
        draw: One bar per name, the first on top.
        width_in, height_in: Of an axes, without the room for names and title.
    """
    columns = max(map(len, rows))
    figure = new_figure(2.4 + width_in * columns, 0.7 + height_in * len(rows), dpi=150)
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for row, all_axes in zip(rows, grid):
        for axes, record in zip(all_axes, row):
            draw(axes, record)
            named = axes is all_axes[0] or names(record) != names(row[0])
            axes.set_yticks(range(len(names(record))), names(record) if named else [""] * len(names(record)))
            axes.invert_yaxis()
        for axes in all_axes[len(row) :]:
            axes.axis("off")
    if legend:
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
    figure.suptitle(title, fontsize=10)
    return figure
