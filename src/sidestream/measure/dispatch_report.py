"""From rounds to figures: statistics, ratios, tables, picture and Markdown of the dispatch benchmark. No torch here."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sidestream.measure.instrument import bars, load, page, pair, ratio, say_left_out, tick
from sidestream.report.charts import COLORS as CHARTS
from sidestream.report.statistics import summarize
from sidestream.report.table import Column, Table, numbers, say, short_commit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console

PARTS = ("dispatch", "combine", "combine_backward", "dispatch_backward")
ALL = (*PARTS, "cycle")
EXCHANGE_BAR = 1.2  # most that our transfers may take over bare ones
COLORS = CHARTS[:4]
# Heads of the table's columns.
WHERE = ("shape", "ranks", "routing")
TIMES = ("dispatch", "combine", "combine'", "dispatch'", "cycle, ms", "q1 - q3", "ratio")
BYTES = ("sent MB per rank", "metadata %", "bytes / necessary", "logical GB/s", "wire GB/s")
BUFFERS = ("buffer rows", "needed", "lost %", "pinned MiB", "peak MiB")


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
        arm["ratio"] = ratio(arm["ms"]["cycle"], base["ms"]["cycle"])
        arm["gbps"] = None if arm["kind"] != "dispatcher" else _gbps(arm, need)
        arm["bytes_over_necessary"] = _over_necessary(arm, need)
    record["exchange_over_bare"] = {
        name.removeprefix("exchange of "): ratio(
            arm["ms"]["cycle"], arms[name.replace("exchange", "bare", 1)]["ms"]["cycle"]
        )
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


def table(records: Sequence[dict[str, Any]], *, title: str = "", kinds: Sequence[str] = ()) -> Table:
    """The figures of shapes and routings, a row per arm; pairs are minimum / median.

    Args:
        kinds: Of arms; empty: all.
    """
    found = Table(
        [*WHERE, Column("arm", code=True), "transport", *numbers(*TIMES, *BYTES, *BUFFERS)], title=title
    )
    for record in records:
        for name, arm in record["arms"].items():
            if kinds and arm["kind"] not in kinds:
                continue
            ms, cycle = arm["ms"], arm["ms"]["cycle"]
            found.add(
                record["shape"],
                str(record["world_size"]),
                record["routing"]["kind"],
                name,
                arm["transport"] or "-",
                *(
                    pair(ms[part], 2 if (at := ms[part]["median"]) < 10 else 1 if at < 100 else 0)
                    for part in ALL
                ),
                f"{cycle['q1']:.1f} - {cycle['q3']:.1f}",
                pair(arm["ratio"]),
                *_byte_cells(arm, record["world_size"]),
                strong=arm["kind"] == "dispatcher",
            )
    return found


def _byte_cells(arm: dict[str, Any], world_size: int) -> list[str]:
    """What was sent and kept; a floor only moves the rows of another arm."""
    if arm["kind"] != "dispatcher":
        return ["-"] * 10
    cells = ["not said", "-", "-"]
    if arm["bytes"] is not None:
        rows, metadata = (
            [sum(arm["bytes"][part][what][rank] for part in PARTS) for rank in range(world_size)]
            for what in ("rows", "metadata")
        )
        total, over = sum(rows) + sum(metadata), arm["bytes_over_necessary"]
        cells = [
            " ".join(f"{(a + b) / 1e6:.2f}" for a, b in zip(rows, metadata)),
            f"{100 * sum(metadata) / total:.1f}" if total else "-",
            f"{over['all']:.3f}" if over else "-",
        ]
    speed, static, peak = arm["gbps"]["cycle"], arm["static"], arm["peak_memory_bytes"]
    cells += [f"{speed['logical']:.3g}", "-" if speed["wire"] is None else f"{speed['wire']:.3g}"]
    if static:
        lost = f"{100 * static['dropped_share']:.1f}"
        cells += [str(static["budget_rows"]), str(static["needed_rows"]), lost]
    else:
        cells += [str(arm["buffer_rows"]), "exact", "0"]
    return [*cells, f"{arm['pinned_bytes'] / 2**20:.1f}", "?" if peak is None else f"{peak / 2**20:.1f}"]


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
        routing = record["routing"]
        title = (
            f"{record['shape']}: T={record['tokens']} H={record['hidden_size']} E={record['num_experts']} "
            f"K={record['top_k']}, {result['precision']}, {record['world_size']} rank(s), routing {routing['kind']}: "
            f"load max/mean {routing['expert_max_over_mean']:.2f} per expert, {routing['rank_max_over_mean']:.2f} per "
            f"rank; ratio: of the cycle to {record['against']}"
        )
        table([record], title=title).without(*WHERE, *BYTES, *BUFFERS).show(console)
        title = "bytes of the four exchanges, and buffers"
        table([record], title=title, kinds=["dispatcher"]).without(*WHERE, "transport", *TIMES).show(console)
        say_left_out(record["left_out"], console)
        for name, over in record["exchange_over_bare"].items():
            verdict = "within" if over["median"] <= EXCHANGE_BAR else "ABOVE"
            say(
                f"exchange / bare of {name}: {pair(over)}, {verdict} the bar of {EXCHANGE_BAR} (by median)",
                console,
            )
    if len(mixed := transports(result)) > 1:
        say(f"Transports differ between arms: {', '.join(mixed)}.", console, style="yellow")
    say(
        "Pairs are minimum / median in ms, slowest rank; combine' and dispatch' are the backward passes. An arm that "
        f"loses routes does less work: do not compare it. {load(result)}",
        console,
    )


def draw(result: dict[str, Any]) -> Figure:
    """Stacked bars of the four parts by median, a row per routing and number of ranks; a tick marks the cycle."""
    kinds = dict.fromkeys((r["world_size"], r["routing"]["kind"]) for r in result["results"])
    rows = [
        [r for r in result["results"] if (r["world_size"], r["routing"]["kind"]) == kind] for kind in kinds
    ]
    moved = ", ".join(transports(result)) or "none"
    return bars(
        rows,
        _draw,
        names=lambda record: [name.replace(",dispatcher.", ",\n") for name in record["arms"]],
        title=f"Dispatch and combine, both passes\n{result['device']}, transport {moved}, {result['precision']}",
        width_in=3.4,
        height_in=0.9 + 0.28 * max(len(record["arms"]) for row in rows for record in row),
        legend=True,
    )


def _draw(axes: Axes, record: dict[str, Any]) -> None:
    arms, places = list(record["arms"].values()), range(len(record["arms"]))
    left = [0.0] * len(arms)
    for part, color in zip(PARTS, COLORS):
        width = [arm["ms"][part]["median"] for arm in arms]
        drawn = axes.barh(
            places, width, left=left, color=color, edgecolor="white", label=part.replace("_", " ")
        )
        for bar, arm in zip(drawn, arms):
            bar.set_hatch("" if arm["kind"] == "dispatcher" else "//")
        left = [a + b for a, b in zip(left, width)]
    cycles = [arm["ms"]["cycle"]["median"] for arm in arms]
    tick(axes, cycles, label="cycle in one go")
    for place, arm in enumerate(arms):
        if arm["static"] and arm["static"]["dropped_share"]:
            lost = f" loses {100 * arm['static']['dropped_share']:.0f} %"
            axes.annotate(lost, (max(left[place], cycles[place]), place), va="center", color=CHARTS[6])
    axes.set_xlim(right=1.2 * max(*left, *cycles))
    axes.set_title(f"{record['shape']}, {record['world_size']} rank(s), {record['routing']['kind']}")
    axes.set_xlabel("ms (median)")


def markdown(result: dict[str, Any]) -> str:
    """The table of a page, and the facts under it."""
    hidden = (*TIMES[:4], "q1 - q3", *BYTES[:2], *BYTES[3:], *BUFFERS[3:])
    shown = table(result["results"]).without(*hidden)
    return page(shown, facts(result))


def facts(result: dict[str, Any]) -> list[str]:
    """What a reader must know beside the figures."""
    commit = short_commit(f"{result['commit']}{'-dirty' if result['dirty'] else ''}")
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
