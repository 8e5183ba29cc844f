"""From rounds to figures: statistics, ratios, the table and the picture of the layer benchmark. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from sidestream.profiling.rounds import summarize
from sidestream.tracking import drawing

COLORS = {"sidestream": drawing.COLORS[0], "peer": drawing.COLORS[1], "dense": drawing.NEUTRAL}
PASSES = ("forward", "forward_backward")
STATISTICS = ("min", "median")
ADDED = ("forward_ms", "forward_backward_ms", "ratio_to_dense", "ratio_to_fastest_peer")


def add_statistics(record: dict[str, Any], *, against: Sequence[str] = ()) -> None:
    """Fill in a shape's record, from the rounds of its arms.

    Each arm gets `forward_ms` and `forward_backward_ms`, `ratio_to_dense` and `ratio_to_fastest_peer` (by minimum and
    by median, forward and backward together), and the same under `frozen` where there are frozen rounds. The record
    gets `fastest_peer` (its name by minimum and by median), null without peers.

    Args:
        against: Names of arms; each arm gets its ratio to them in `ratio_to`, null to one that is not there.
    """
    arms = record["arms"]
    record["fastest_peer"] = _compare(arms, rounds="rounds_ms")
    for arm in arms.values():
        arm["ratio_to"] = {
            name: _ratio(arm, dict.fromkeys(STATISTICS, arms[name])) if name in arms else None
            for name in against
        }
    if all(arm["frozen_rounds_ms"] is not None for arm in arms.values()):
        frozen = {name: {key: arm[key] for key in ("kind", "frozen_rounds_ms")} for name, arm in arms.items()}
        _compare(frozen, rounds="frozen_rounds_ms")
        for name, arm in arms.items():
            arm["frozen"] = {key: frozen[name][key] for key in ADDED}


def _compare(arms: dict[str, dict[str, Any]], *, rounds: str) -> dict[str, str] | None:
    for arm in arms.values():
        for part in PASSES:
            arm[f"{part}_ms"] = summarize(arm[rounds][part])
    peers = [name for name, arm in arms.items() if arm["kind"] == "peer"]
    fastest = None
    if peers:
        fastest = {
            by: min(peers, key=lambda name: arms[name]["forward_backward_ms"][by]) for by in STATISTICS
        }
    for arm in arms.values():
        arm["ratio_to_dense"] = _ratio(arm, dict.fromkeys(STATISTICS, arms["dense"]))
        arm["ratio_to_fastest_peer"] = fastest and _ratio(arm, {by: arms[fastest[by]] for by in STATISTICS})
    return fastest


def _ratio(arm: dict[str, Any], other: dict[str, dict[str, Any]]) -> dict[str, float]:
    times = arm["forward_backward_ms"]
    return {by: round(times[by] / peer["forward_backward_ms"][by], 4) for by, peer in other.items()}


def table(record: dict[str, Any], *, precision: str, peers: str) -> Table:
    """The figures of one shape."""
    routing = record["routing"]
    title = (
        f"{record['shape']}: T={record['tokens']} D={record['hidden_size']} F={record['expert_hidden_size']} "
        f"E={record['num_experts']} K={record['top_k']}, {precision}, {record['world_size']} rank(s), "
        f"load max/mean {routing['expert_max_over_mean']:.2f}, peers={peers}"
    )
    frozen = any("frozen" in arm for arm in record["arms"].values())
    out = Table(title=title, title_justify="left")
    out.add_column("arm", no_wrap=True)
    against = next(iter(record["arms"].values())).get("ratio_to", {})
    columns = [
        "fwd ms",
        "fwd+bwd ms",
        "q1 - q3",
        "x dense",
        "x fastest peer",
        *(f"x ({n})" for n in range(1, 1 + len(against))),
    ]
    for column in [*columns, *(["frozen fwd+bwd"] if frozen else []), "peak MiB", "sent MB"]:
        out.add_column(column, justify="right", no_wrap=True)
    for name, arm in record["arms"].items():
        both, peak = arm["forward_backward_ms"], arm["peak_memory_bytes"]
        row = [
            _pair(arm["forward_ms"], digits=1),
            _pair(both, digits=1),
            f"{both['q1']:.1f} - {both['q3']:.1f}",
            _pair(arm["ratio_to_dense"]),
            _pair(arm["ratio_to_fastest_peer"]),
            *(_pair(arm["ratio_to"][name]) for name in against),
        ]
        if frozen:
            row.append(_pair(arm["frozen"]["forward_backward_ms"], digits=1))
        row += ["?" if peak is None else f"{peak / 2**20:.0f}", f"{arm['bytes_on_wire'] / 1e6:.1f}"]
        out.add_row(name, *row, style="bold" if arm["kind"] == "sidestream" else None)
    return out


def _pair(values: dict[str, float] | None, *, digits: int = 2) -> str:
    return "-" if values is None else f"{values['min']:.{digits}f} / {values['median']:.{digits}f}"


def print_tables(result: dict[str, Any], console: Console) -> None:
    """All shapes, and how to read them."""
    for record in result["results"]:
        console.print(
            table(record, precision=result["precision"], peers=", ".join(result["peers"]) or "none")
        )
        for number, name in enumerate(next(iter(record["arms"].values())).get("ratio_to", {}), 1):
            absent = "" if name in record["arms"] else ", which is not there"
            console.print(f"({number}) is {name}{absent}", highlight=False)
        for name, reason in record["left_out"].items():
            console.print(f"left out: {name}: {reason}", style="yellow", highlight=False)
        for name, arm in record["arms"].items():
            if static := arm.get("static"):
                console.print(
                    f"{name}: {static['budget_rows']} rows per rank, at most {static['needed_rows']} needed, "
                    f"{static['dropped_routes']} routes lost in all rounds",
                    highlight=False,
                )
    for name, reason in result["peers_left_out"].items():
        console.print(f"left out: {name}: {reason}", style="yellow", highlight=False)
    before, after = result["load_average"]["before"][0], result["load_average"]["after"][0]
    console.print(
        f"Pairs are minimum / median over {result['rounds']} rounds with fresh routing, slowest rank; ratios are of "
        f"fwd+bwd. Load average {before:.1f} before, {after:.1f} after. Only ratios within one run mean anything.",
        highlight=False,
    )


def draw(result: dict[str, Any]) -> Figure:
    """Bars of forward + backward over `dense`, by minimum, a row per number of ranks; a tick marks the median."""
    worlds = sorted({record["world_size"] for record in result["results"]})
    rows = [[r for r in result["results"] if r["world_size"] == world] for world in worlds]
    columns = max(map(len, rows))
    figure, grid = plt.subplots(
        len(rows),
        columns,
        figsize=(2.2 + 2.6 * columns, 0.4 + 3.2 * len(rows)),
        layout="constrained",
        squeeze=False,
    )
    for row, all_axes in zip(rows, grid):
        for axes, record in zip(all_axes, row):
            _draw_bars(
                axes, record, labels=axes is all_axes[0] or list(record["arms"]) != list(row[0]["arms"])
            )
        for axes in all_axes[len(row) :]:
            axes.axis("off")
    figure.suptitle(
        f"One MoE layer, forward + backward, {result['precision']}: minimum (bar), median (tick)", fontsize=10
    )
    return figure


def _draw_bars(axes: Axes, record: dict[str, Any], *, labels: bool) -> None:
    names = [name for name in record["arms"] if name != "dense"]
    arms = [record["arms"][name] for name in names]
    places = range(len(names))
    ratios = [arm["ratio_to_dense"]["min"] for arm in arms]
    axes.barh(places, ratios, color=[COLORS[arm["kind"]] for arm in arms])
    axes.plot([arm["ratio_to_dense"]["median"] for arm in arms], places, "k|", markersize=12)
    for place, ratio in zip(places, ratios):
        axes.annotate(
            f"{ratio:.2f}",
            (0, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            color="white",
            fontsize=8,
        )
    axes.axvline(1.0, color="0.4", linestyle="--", linewidth=1)
    axes.set_yticks(places, names if labels else [""] * len(names), fontsize=8)
    axes.invert_yaxis()
    axes.set_title(f"{record['shape']}, {record['world_size']} rank(s)", fontsize=9)
    axes.set_xlabel("time / dense", fontsize=8)


def save_picture(result: dict[str, Any], path: Path) -> None:
    figure = draw(result)
    figure.savefig(path, dpi=150)
    plt.close(figure)
