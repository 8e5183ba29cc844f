"""Says what this machine can run: every dispatcher with each transport, overlap, fusion, graph, link and strategy.

python scripts/doctor.py [--json doctor.json]

Looks only, in about a second: nothing is imported that needs a GPU. What cannot run is said in the words in which
train.py refuses it. `scripts/check_gpu.py` tries things out.
"""

import os
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.text import Text

from sidestream.commands import shared
from sidestream.config.availability import LIBRARIES, Machine, takes_library, verdict
from sidestream.config.capabilities import Capabilities, capabilities
from sidestream.config.fusion_check import CHUNKED, NONE, is_mega
from sidestream.config.graph_check import FACTOR, obstacle
from sidestream.config.place import CONF
from sidestream.tracking.folder import write_json_atomic

GROUPS = ("overlap", "fusion", "graph", "link", "strategy")  # beside the dispatchers


@dataclass(frozen=True)
class DispatcherRow:
    """A dispatcher with one of its transports.

    Attributes:
        transport: `library`, `torch`, or `none` where nothing moves.
        auto: `dispatcher.transport=auto` takes this one here; false where there is no such key.
        eager_reads, static_reads: Host reads per layer and forward pass; None: not known, or no such mode.
        static: There is a static mode.
        why, fix: See `availability.Verdict`.
    """

    dispatcher: str
    transport: str
    ok: bool
    auto: bool
    eager_reads: int | None
    static: bool
    static_reads: int | None
    why: str
    fix: str


@dataclass(frozen=True)
class OptionRow:
    """An option of another group."""

    group: str
    option: str
    ok: bool
    why: str
    fix: str


@dataclass(frozen=True)
class GraphRow:
    """A combination under `graph=step`.

    Attributes:
        sizes: `exact`, or `budget` with `dispatcher.capacity_factor`.
        ok: It can be captured.
    """

    dispatcher: str
    sizes: str
    fusion: str
    overlap: str
    ok: bool
    why: str
    fix: str


def options(group: str) -> Iterator[tuple[str, DictConfig]]:
    """Yields (name, values) of the options of a group."""
    for path in sorted((CONF / group).glob("*.yaml")):
        node = OmegaConf.load(path)
        assert isinstance(node, DictConfig), path
        yield path.stem, node.get(group, node)  # an option that sets other groups too has its own in a group


def dispatcher_rows(machine: Machine) -> list[DispatcherRow]:
    return [
        dispatcher_row(option, transport, capabilities(node), machine)
        for option, node in options("dispatcher")
        for transport in transports(node)
    ]


def dispatcher_row(option: str, transport: str, can: Capabilities, machine: Machine) -> DispatcherRow:
    auto, eager_reads = False, can.host_reads_eager
    if can.library is not None:
        to_library = takes_library("auto", can.library, machine=machine)
        auto = to_library == (transport == "library")
        if transport == "library":
            eager_reads = LIBRARIES[can.library].host_reads_eager
    found = verdict("dispatcher", can.library or option, transport=transport, machine=machine)
    return DispatcherRow(
        dispatcher=option,
        transport=transport,
        ok=found.ok,
        auto=auto,
        eager_reads=eager_reads,
        static=can.static,
        static_reads=can.host_reads_static if can.static else None,
        why=found.why,
        fix=found.fix,
    )


def transports(node: DictConfig) -> tuple[str, ...]:
    """Returns what can move the rows of a dispatcher."""
    if "transport" in node:
        return ("library", "torch")
    moves = capabilities(node).max_expert_parallel_size != 1 and node.get("_target_") != NONE
    return ("torch",) if moves else ("none",)


def option_rows(machine: Machine) -> list[OptionRow]:
    found = [
        (group, option, verdict(group, option, machine=machine))
        for group in GROUPS
        for option, _ in options(group)
    ]
    return [OptionRow(group, option, **asdict(each)) for group, option, each in found]


def graph_rows() -> list[GraphRow]:
    """Returns what a step graph makes of every dispatcher, with exact sizes and with a budget, schedule and fusion."""
    rows = []
    for dispatcher, node in options("dispatcher"):
        for sizes in ("exact", "budget") if capabilities(node).static else ("exact",):
            given = OmegaConf.merge(node, {"capacity_factor": FACTOR}) if sizes == "budget" else node
            for fusion, experts in options("fusion"):
                if is_mega(experts) != (node.get("_target_") == NONE):
                    continue  # the one goes with the other
                found = obstacle(given, experts)  # type: ignore[arg-type]
                why, fix = ("", "") if found is None else (found.why, f"set {found.fix}")
                for overlap, _ in options("overlap"):
                    row = GraphRow(dispatcher, sizes, fusion, overlap, found is None, why, fix)
                    if is_mega(experts) and overlap == "chunked":
                        row = replace(row, ok=False, why=CHUNKED, fix="set overlap=none")
                    rows.append(row)
    return rows


def facts(machine: Machine) -> dict[str, str]:
    """Returns what was found on the machine, in words."""
    gpus = f"{machine.gpus} ({', '.join(machine.gpu_names) or 'model unknown'})" if machine.gpus else "none"
    capability = ".".join(map(str, machine.capability)) if machine.capability else "unknown"
    nvcc = machine.nvcc or ", ".join(sorted(machine.nvcc_variables)) or "not found"
    return {
        "platform": f"{machine.platform}, {os.cpu_count()} CPU cores",
        "Python, torch": f"{machine.python}, {machine.torch or 'not installed'}",
        "GPUs": f"{gpus}, compute capability {capability}" if machine.gpus else gpus,
        "nvcc": nvcc,
        "NCCL wheel": f"{machine.nccl_wheel} {machine.nccl}" if machine.nccl else "none",
        "libraries": ", ".join(sorted(machine.modules)) or "none",
    }


def reads(number: int | None, *, exists: bool = True) -> str:
    if not exists:
        return "-"
    return "unknown" if number is None else f"{number} read{'' if number == 1 else 's'}"


def state(ok: bool) -> Text:
    return Text("yes", style="green") if ok else Text("no", style="yellow")


def words(why: str, fix: str) -> str:
    return "; ".join(part for part in (why, fix) if part)


def show(
    machine: Machine,
    dispatchers: list[DispatcherRow],
    graphs: list[GraphRow],
    others: list[OptionRow],
    console: Console,
) -> None:
    found = [Line((name, value)) for name, value in facts(machine).items()]
    print_lines(console, ("this machine", ""), found)
    lines = []
    for row in dispatchers:
        transport = f"{row.transport} (auto)" if row.auto else row.transport
        eager, static = reads(row.eager_reads), reads(row.static_reads, exists=row.static)
        cells = (row.dispatcher, transport, state(row.ok), eager, static)
        lines.append(Line(cells, words(row.why, row.fix)))
    print_lines(console, ("dispatcher", "transport", "runs", "eager", "static"), lines)
    legend = "auto: what dispatcher.transport=auto takes; read: the host waits, per layer and forward pass"
    console.print(Text(legend, style="dim"))
    print_lines(
        console, ("graph=step with", "fusion", "sizes", "captured under overlap="), graph_lines(graphs)
    )
    lines = [Line((row.group, row.option, state(row.ok)), words(row.why, row.fix)) for row in others]
    print_lines(console, ("group", "option", "runs"), lines)


@dataclass(frozen=True)
class Line:
    """A line of a listing.

    Attributes:
        note: Stands below it, so that the columns stay narrow.
    """

    cells: tuple[str | Text, ...]
    note: str = ""


def print_lines(console: Console, heads: tuple[str, ...], lines: list[Line]) -> None:
    """Prints columns that are as wide as what is in them; the last one, and notes, are wrapped to fit."""
    widths = [max(map(len, column)) + 2 for column in zip(heads, *(line.cells for line in lines))]
    console.print()
    for line in (Line(tuple(Text(head, style="bold") for head in heads)), *lines):
        text = Text()
        for cell, width in zip(line.cells[:-1], widths):
            text.append(cell)
            text.pad_right(width - len(cell))
        last = line.cells[-1] if isinstance(line.cells[-1], Text) else Text(line.cells[-1])
        beside = wrapped(last.plain, console.width - len(text))
        if len(text) + max(map(len, beside)) > console.width:  # no room beside
            console.print(text, soft_wrap=True)
            text, beside = Text(" " * 4), wrapped(last.plain, console.width - 4)
        indent = " " * len(text)
        text.append(beside[0], style=last.style)
        console.print(text, soft_wrap=True)
        for part in beside[1:]:
            console.print(Text(f"{indent}{part}", style=last.style), soft_wrap=True)
        for part in wrapped(line.note, console.width - 4) if line.note else ():
            console.print(Text(f"    {part}", style="dim"), soft_wrap=True)


def wrapped(text: str, width: int) -> list[str]:
    """Words stay whole, so that what is said can be copied."""
    return textwrap.wrap(text, max(20, width), break_long_words=False, break_on_hyphens=False) or [""]


def graph_lines(graphs: list[GraphRow]) -> list[Line]:
    """One line per dispatchers that a step graph makes the same of."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for line in dict.fromkeys((row.dispatcher, row.sizes, row.fusion) for row in graphs):
        cells = [row for row in graphs if (row.dispatcher, row.sizes, row.fusion) == line]
        fails = [row.overlap for row in cells if not row.ok]
        captured = (
            "none of them" if len(fails) == len(cells) else f"all but {', '.join(fails)}" if fails else "all"
        )
        fixes = ", ".join(dict.fromkeys(row.fix for row in cells if not row.ok))
        alike.setdefault((line[2], line[1], captured, fixes), []).append(line[0])
    lines = []
    for (fusion, sizes, captured, fixes), dispatchers in alike.items():
        first, *more = dispatchers
        note = f"and {', '.join(more)}" if more else ""
        lines.append(
            Line((first, fusion, sizes, captured), "; ".join(part for part in (note, fixes) if part))
        )
    return lines


def main(argv: list[str] | None = None, *, machine: Machine | None = None) -> int:
    parser = shared.parser(__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the tables to this file too")
    arguments = parser.parse_args(argv)
    shared.check_place(arguments.json)
    machine = machine or Machine.here()
    dispatchers, graphs, others = dispatcher_rows(machine), graph_rows(), option_rows(machine)
    show(machine, dispatchers, graphs, others, Console())
    if arguments.json is not None:
        known: dict[str, Any] = {**asdict(machine), "cpu_cores": os.cpu_count()}
        plain = {
            name: sorted(value) if isinstance(value, frozenset) else value for name, value in known.items()
        }
        rows = {
            "dispatchers": [asdict(row) for row in dispatchers],
            "graphs": [asdict(row) for row in graphs],
            "options": [asdict(row) for row in others],
        }
        write_json_atomic(arguments.json, {"machine": plain, **rows})
    return 0


def run() -> NoReturn:
    shared.run(main)
