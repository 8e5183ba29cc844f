"""From rounds to figures: statistics, ratios, the table and the picture of the layer benchmark. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sidestream.measure.instrument import (
    STATISTICS,
    bars,
    facts,
    load,
    page,
    pair,
    ratio,
    say_left_out,
    tick,
)
from sidestream.report import charts
from sidestream.report.statistics import summarize
from sidestream.report.table import Column, Table, numbers, say

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console

COLORS = {"sidestream": charts.COLORS[0], "peer": charts.COLORS[1], "dense": charts.NEUTRAL}
PASSES = ("forward", "forward_backward")
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
        times = arm["forward_backward_ms"]
        arm["ratio_to"] = {
            name: ratio(times, arms[name]["forward_backward_ms"]) if name in arms else None
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
    both = {name: arm["forward_backward_ms"] for name, arm in arms.items()}
    peers = [name for name, arm in arms.items() if arm["kind"] == "peer"]
    fastest = {by: min(peers, key=lambda name: both[name][by]) for by in STATISTICS} if peers else None
    best = {by: both[name][by] for by, name in fastest.items()} if fastest else None
    for name, arm in arms.items():
        arm["ratio_to_dense"] = ratio(both[name], both["dense"])
        arm["ratio_to_fastest_peer"] = best and ratio(both[name], best)
    return fastest


def table(records: Sequence[dict[str, Any]], *, against: Sequence[str], title: str = "") -> Table:
    """The figures of shapes, a row per arm; pairs are minimum / median.

    Args:
        against: What the ratios to `ratio_to` are called.
    """
    every = [arm for record in records for arm in record["arms"].values()]
    frozen = any("frozen" in arm for arm in every)
    found = Table(
        [
            "shape",
            "ranks",
            Column("arm", code=True),
            *numbers("fwd ms", "fwd+bwd ms", "q1 - q3", "x dense", "x fastest peer"),
            *numbers(*(f"x {name}" for name in against)),
            *numbers(*(["frozen fwd+bwd"] if frozen else []), "peak MiB", "sent MB"),
        ],
        title=title,
    )
    for record in records:
        for name, arm in record["arms"].items():
            both, peak = arm["forward_backward_ms"], arm["peak_memory_bytes"]
            found.add(
                record["shape"],
                str(record["world_size"]),
                name,
                pair(arm["forward_ms"], 1),
                pair(both, 1),
                f"{both['q1']:.1f} - {both['q3']:.1f}",
                *(pair(arm[f"ratio_to_{other}"]) for other in ("dense", "fastest_peer")),
                *(pair(value) for value in arm.get("ratio_to", {}).values()),
                *([pair(arm["frozen"]["forward_backward_ms"], 1)] if frozen else []),
                "?" if peak is None else f"{peak / 2**20:.0f}",
                f"{arm['bytes_on_wire'] / 1e6:.1f}",
                strong=arm["kind"] == "sidestream",
            )
    return found


def print_tables(result: dict[str, Any], console: Console) -> None:
    """All shapes, and how to read them."""
    peers = ", ".join(result["peers"]) or "none"
    for record in result["results"]:
        title = (
            f"{record['shape']}: T={record['tokens']} D={record['hidden_size']} F={record['expert_hidden_size']} "
            f"E={record['num_experts']} K={record['top_k']}, {result['precision']}, {record['world_size']} rank(s), "
            f"load max/mean {record['routing']['expert_max_over_mean']:.2f}, peers={peers}"
        )
        names = list(next(iter(record["arms"].values())).get("ratio_to", {}))
        numbers = [f"({number})" for number in range(1, 1 + len(names))]
        table([record], against=numbers, title=title).without("shape", "ranks").show(console)
        for number, name in zip(numbers, names):
            say(f"{number} is {name}{'' if name in record['arms'] else ', which is not there'}", console)
        say_left_out(record["left_out"], console)
        for name, arm in record["arms"].items():
            if static := arm.get("static"):
                line = (
                    f"{name}: {static['budget_rows']} rows per rank, at most {static['needed_rows']} needed, "
                    f"{static['dropped_routes']} routes lost in all rounds"
                )
                say(line, console)
    say_left_out(result["peers_left_out"], console)
    line = (
        f"Pairs are minimum / median over {result['rounds']} rounds with fresh routing, slowest rank; ratios are of "
        f"fwd+bwd. {load(result)} Only ratios within one run mean anything."
    )
    say(line, console)


def markdown(result: dict[str, Any]) -> str:
    """The table of a page: forward + backward as ratios, and the facts under it."""
    against = [f"`{name}`" for name in result.get("against", [])]
    whole = table(result["results"], against=against)
    whole.rows = [row for row in whole.rows if row.cells[2].text != "dense"]
    shown = whole.without("fwd ms", "fwd+bwd ms", "q1 - q3", "frozen fwd+bwd", "sent MB")
    said = facts(result, measured=f"{result['rounds']} rounds", emulated="; ".join(result["emulated"]))
    return page(shown, said)


def draw(result: dict[str, Any]) -> Figure:
    """Bars of forward + backward over `dense`, by minimum, a row per number of ranks; a tick marks the median."""
    worlds = sorted({record["world_size"] for record in result["results"]})
    return bars(
        [[record for record in result["results"] if record["world_size"] == world] for world in worlds],
        _draw,
        names=lambda record: [name for name in record["arms"] if name != "dense"],
        title=f"One MoE layer, forward + backward, {result['precision']}: minimum (bar), median (tick)",
        width_in=2.6,
        height_in=3.2,
    )


def _draw(axes: Axes, record: dict[str, Any]) -> None:
    arms = [arm for name, arm in record["arms"].items() if name != "dense"]
    ratios = [arm["ratio_to_dense"]["min"] for arm in arms]
    axes.barh(range(len(arms)), ratios, color=[COLORS[arm["kind"]] for arm in arms])
    tick(axes, [arm["ratio_to_dense"]["median"] for arm in arms])
    for place, shown in enumerate(ratios):
        text = axes.annotate(
            f"{shown:.2f}", (0, place), xytext=(4, 0), textcoords="offset points", va="center"
        )
        text.set_color("white")
    axes.axvline(1.0, color="0.4", linestyle="--", linewidth=1)
    axes.set_title(f"{record['shape']}, {record['world_size']} rank(s)")
    axes.set_xlabel("time / dense")
