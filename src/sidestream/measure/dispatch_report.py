"""From rounds to figures: statistics, ratios, tables, picture and Markdown of the dispatch benchmark. No torch here."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from sidestream.measure.report import STATISTICS
from sidestream.profiling.rounds import summarize
from sidestream.tracking.drawing import COLORS

PARTS = ("dispatch", "combine", "combine_backward", "dispatch_backward")
ALL = (*PARTS, "cycle")
EXCHANGE_BAR = 1.2  # most that our transfers may take over bare ones
_COLORS = COLORS[:4]


def all_rounds(arm: dict[str, Any], part: str) -> list[float]:
    """Every round of every start, in milliseconds."""
    return [value for start in arm["starts"] for value in start["rounds_ms"][part]]


def add_statistics(record: dict[str, Any], *, against: str | None = None) -> None:
    """Fill in a record from the rounds of its arms.

    Each arm gets `ms` (of each part and of the cycle), `ratio` of its cycle to the one of `against` (by minimum and by
    median), `gbps` (`logical` and `wire`, by median; see docs/dispatch_benchmark.md) and `bytes_over_necessary`. The
    record gets `against` and, where there are floors, `exchange_over_bare`.

    Args:
        against: Name of an arm; None: the first.
    """
    arms = record["arms"]
    record["against"] = against if against in arms else next(iter(arms))
    for arm in arms.values():
        arm["ms"] = {part: _summary(arm, part) for part in ALL}
    base = arms[record["against"]]
    need = record["necessary_bytes"]
    for arm in arms.values():
        arm["ratio"] = _ratio(arm, base)
        arm["gbps"] = None if arm["kind"] != "dispatcher" else _gbps(arm, need)
        arm["bytes_over_necessary"] = _over_necessary(arm, need)
    record["exchange_over_bare"] = {
        name.removeprefix("exchange of "): _ratio(arm, arms[name.replace("exchange", "bare", 1)])
        for name, arm in arms.items()
        if arm["kind"] == "exchange"
    }


def _summary(arm: dict[str, Any], part: str) -> dict[str, Any]:
    values = all_rounds(arm, part)
    mean = statistics.fmean(values)
    medians = [statistics.median(start["rounds_ms"][part]) for start in arm["starts"]]
    return {
        **summarize(values),
        "cv": round(statistics.pstdev(values) / mean, 4),
        "start_medians": [round(median, 4) for median in medians],
    }


def _ratio(arm: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    return {by: round(arm["ms"]["cycle"][by] / other["ms"]["cycle"][by], 4) for by in STATISTICS}


def _gbps(arm: dict[str, Any], need: dict[str, Any]) -> dict[str, dict[str, float | None]]:
    """1e9 bytes per second: bytes / 1e6 / milliseconds."""
    found: dict[str, dict[str, float | None]] = {}
    for part in ALL:
        median, parts = arm["ms"][part]["median"], PARTS if part == "cycle" else (part,)
        wire = None
        if arm["bytes"] is not None:
            wire = round(sum(arm["bytes"][each]["busiest"] for each in parts) / 1e6 / median, 4)
        found[part] = {"logical": round(len(parts) * need["logical"] / 1e6 / median, 4), "wire": wire}
    return found


def _over_necessary(arm: dict[str, Any], need: dict[str, Any]) -> dict[str, float] | None:
    if arm["bytes"] is None or not need["cycle"]:
        return None
    rows = sum(sum(arm["bytes"][part]["rows"]) for part in PARTS)
    metadata = sum(sum(arm["bytes"][part]["metadata"]) for part in PARTS)
    return {"rows": round(rows / need["cycle"], 4), "all": round((rows + metadata) / need["cycle"], 4)}


def _title(record: dict[str, Any], precision: str) -> str:
    routing = record["routing"]
    return (
        f"{record['shape']}: T={record['tokens']} H={record['hidden_size']} E={record['num_experts']} "
        f"K={record['top_k']}, {precision}, {record['world_size']} rank(s), routing {routing['kind']}: load max/mean "
        f"{routing['expert_max_over_mean']:.2f} per expert, {routing['rank_max_over_mean']:.2f} per rank"
    )


def time_table(record: dict[str, Any], *, precision: str) -> Table:
    """Milliseconds of one shape with one routing."""
    out = Table(title=_title(record, precision), title_justify="left")
    out.add_column("arm", no_wrap=True)
    columns = ["dispatch", "combine", "combine'", "dispatch'", "cycle", "q1 - q3"]
    for column in ["transport", *columns, f"x {record['against']}"]:
        out.add_column(column, justify="right", no_wrap=True)
    for name, arm in record["arms"].items():
        cycle = arm["ms"]["cycle"]
        out.add_row(
            name,
            arm["transport"] or "-",
            *(_ms(arm["ms"][part]) for part in ALL),
            f"{cycle['q1']:.1f} - {cycle['q3']:.1f}",
            _pair(arm["ratio"]),
            style="bold" if arm["kind"] == "dispatcher" else None,
        )
    return out


def byte_table(record: dict[str, Any]) -> Table:
    """Bytes and buffers of one shape with one routing."""
    out = Table(title="bytes of the four exchanges, and buffers", title_justify="left")
    out.add_column("arm", no_wrap=True)
    columns = ["sent MB per rank", "metadata %", "x necessary", "logical GB/s", "wire GB/s", "buffer rows"]
    for column in [*columns, "needed", "lost %", "pinned MiB", "peak MiB"]:
        out.add_column(column, justify="right", no_wrap=True)
    for name, arm in record["arms"].items():
        if arm["kind"] == "dispatcher":
            out.add_row(name, *_byte_cells(arm, record["world_size"]))
    return out


def _byte_cells(arm: dict[str, Any], world_size: int) -> list[str]:
    cells = ["not said", "-", "-"]
    if arm["bytes"] is not None:
        rows, metadata = (
            [sum(arm["bytes"][part][what][rank] for part in PARTS) for rank in range(world_size)]
            for what in ("rows", "metadata")
        )
        total = sum(rows) + sum(metadata)
        over = arm["bytes_over_necessary"]
        cells = [
            " ".join(f"{(a + b) / 1e6:.2f}" for a, b in zip(rows, metadata)),
            f"{100 * sum(metadata) / total:.1f}" if total else "-",
            f"{over['all']:.3f}" if over else "-",
        ]
    speed, static, peak = arm["gbps"]["cycle"], arm["static"], arm["peak_memory_bytes"]
    cells += [f"{speed['logical']:.3g}", "-" if speed["wire"] is None else f"{speed['wire']:.3g}"]
    cells.append(f"{static['budget_rows'] if static else arm['buffer_rows']}")
    cells += (
        [
            str(static["needed_rows"]),
            f"{100 * static['dropped_share']:.1f}",
        ]
        if static
        else ["exact", "0"]
    )
    cells.append(f"{arm['pinned_bytes'] / 2**20:.1f}")
    return [*cells, "?" if peak is None else f"{peak / 2**20:.1f}"]


def _pair(values: dict[str, float]) -> str:
    return f"{values['min']:.2f} / {values['median']:.2f}"


def _ms(values: dict[str, float]) -> str:
    """Minimum / median in milliseconds, with the digits that matter."""
    digits = 2 if values["median"] < 10 else 1 if values["median"] < 100 else 0
    return f"{values['min']:.{digits}f} / {values['median']:.{digits}f}"


def transports(result: dict[str, Any]) -> list[str]:
    """What moved the bytes of any arm; nothing does so on one rank."""
    found = {
        arm["transport"]
        for record in result["results"]
        for arm in record["arms"].values()
        if arm["kind"] == "dispatcher" and arm["transport"] is not None
    }
    return sorted(found)


def print_tables(result: dict[str, Any], console: Console) -> None:
    """All records, and how to read them."""
    for record in result["results"]:
        console.print(time_table(record, precision=result["precision"]))
        console.print(byte_table(record))
        for name, reason in record["left_out"].items():
            console.print(f"left out: {name}: {reason}", style="yellow", highlight=False)
        for name, ratio in record["exchange_over_bare"].items():
            verdict = "within" if ratio["median"] <= EXCHANGE_BAR else "ABOVE"
            console.print(
                f"exchange / bare of {name}: {_pair(ratio)}, {verdict} the bar of {EXCHANGE_BAR} (by median)",
                highlight=False,
            )
    if len(mixed := transports(result)) > 1:
        console.print(f"Transports differ between arms: {', '.join(mixed)}.", style="yellow")
    before, after = result["load_average"]["before"][0], result["load_average"]["after"][0]
    console.print(
        "Pairs are minimum / median in ms, slowest rank; combine' and dispatch' are the backward passes. An arm that "
        f"loses routes does less work: do not compare it. Load average {before:.1f} before, {after:.1f} after.",
        highlight=False,
    )


def draw(result: dict[str, Any]) -> Figure:
    """Stacked bars of the four parts by median, a row per routing and number of ranks; a tick marks the cycle."""
    kinds = dict.fromkeys((r["world_size"], r["routing"]["kind"]) for r in result["results"])
    rows = [
        [r for r in result["results"] if (r["world_size"], r["routing"]["kind"]) == kind] for kind in kinds
    ]
    columns = max(map(len, rows))
    bars = max(len(record["arms"]) for row in rows for record in row)
    figure, grid = plt.subplots(
        len(rows),
        columns,
        figsize=(3.0 + 3.4 * columns, 0.9 + len(rows) * (0.9 + 0.28 * bars)),
        layout="constrained",
        squeeze=False,
    )
    for row, all_axes in zip(rows, grid):
        for axes, record in zip(all_axes, row):
            same = axes is not all_axes[0] and list(record["arms"]) == list(row[0]["arms"])
            _draw_bars(axes, record, labels=not same)
        for axes in all_axes[len(row) :]:
            axes.axis("off")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    moved = ", ".join(transports(result)) or "none"
    title = f"Dispatch and combine, both passes\n{result['device']}, transport {moved}, {result['precision']}"
    figure.suptitle(title, fontsize=10)
    return figure


def _draw_bars(axes: Axes, record: dict[str, Any], *, labels: bool) -> None:
    names, places = list(record["arms"]), range(len(record["arms"]))
    arms = list(record["arms"].values())
    left = [0.0] * len(arms)
    for part, color in zip(PARTS, _COLORS):
        width = [arm["ms"][part]["median"] for arm in arms]
        bars = axes.barh(places, width, left=left, color=color, label=part.replace("_", " "))
        for bar, arm in zip(bars, arms):
            bar.set_edgecolor("white")
            bar.set_hatch("" if arm["kind"] == "dispatcher" else "//")
        left = [a + b for a, b in zip(left, width)]
    cycles = [arm["ms"]["cycle"]["median"] for arm in arms]
    axes.plot(cycles, places, "k|", markersize=11, label="cycle in one go")
    for place, arm in zip(places, arms):
        static = arm["static"]
        if static and static["dropped_share"]:
            text = f" loses {100 * static['dropped_share']:.0f} %"
            axes.annotate(
                text, (max(left[place], cycles[place]), place), va="center", fontsize=7, color=COLORS[6]
            )
    axes.set_xlim(right=1.2 * max(*left, *cycles))
    shown = [name.replace(",dispatcher.", ",\n") if labels else "" for name in names]
    axes.set_yticks(places, shown)
    axes.tick_params(labelsize=7)
    axes.invert_yaxis()
    kind = record["routing"]["kind"]
    axes.set_title(f"{record['shape']}, {record['world_size']} rank(s), {kind}", fontsize=9)
    axes.set_xlabel("ms (median)", fontsize=8)


def save_picture(result: dict[str, Any], path: Path) -> None:
    figure = draw(result)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def markdown(result: dict[str, Any]) -> str:
    """The table of a page, and the facts under it."""
    columns = ["shape", "ranks", "routing", "arm", "transport", "cycle ms", "ratio", "bytes / necessary"]
    columns += ["rows: budget / needed", "lost"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for record in result["results"]:
        where = f"| {record['shape']} | {record['world_size']} | {record['routing']['kind']} "
        for name, arm in record["arms"].items():
            over, static = arm["bytes_over_necessary"], arm["static"]
            cells = [
                f"`{name}`" if arm["kind"] == "dispatcher" else name,
                arm["transport"] or "-",
                _ms(arm["ms"]["cycle"]),
                _pair(arm["ratio"]),
                f"{over['all']:.3f}" if over else "-",
                f"{static['budget_rows']} / {static['needed_rows']}" if static else "-",
                f"{100 * static['dropped_share']:.1f} %" if static else "-",
            ]
            lines.append(f"{where}| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"* {fact}." for fact in facts(result))])


def facts(result: dict[str, Any]) -> list[str]:
    """What a reader must know beside the figures."""
    commit = str(result["commit"])[:12] + ("-dirty" if result["dirty"] else "")
    against = ", ".join(dict.fromkeys(f"`{record['against']}`" for record in result["results"]))
    floors = [
        f"{record['shape']} {record['routing']['kind']} `{name}` {ratio['median']:.2f}"
        for record in result["results"]
        for name, ratio in record["exchange_over_bare"].items()
    ]
    commands = dict.fromkeys(f"`{one['command']}`" for one in result["environments"])
    found = [f"Commands: {'; '.join(commands)}"]
    for one in result["environments"]:
        load = ", ".join(f"{value:.1f}" for value in one["load_average"]["before"])
        device = one["cpu"] if result["device"] == "cpu" else f"{result['device']}, NCCL {one['nccl']}"
        pinned = ", one thread and core a rank" if result["pinned"] else ""
        found.append(
            f"Machine: {device}{pinned}, torch {one['versions']['torch']}, {result['precision']}; load average before "
            f"{load}"
        )
    found.append(f"Commit `{commit}`; {result['rounds']} rounds in each of {result['starts']} start(s)")
    found.append(f"Ratio: cycle over that of {against}, minimum / median")
    if floors:
        found.append(f"Exchange over bare transfers, bar {EXCHANGE_BAR}, by median: {', '.join(floors)}")
    found.append(f"Emulated: {'; '.join(result['emulated']) or 'nothing'}")
    return found
