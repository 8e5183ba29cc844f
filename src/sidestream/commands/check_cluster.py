"""Checks every dispatcher against a computation without an exchange, then times those that passed.

torchrun --nproc-per-node 8 scripts/check_cluster.py   on GPUs, with the libraries installed
python scripts/check_cluster.py --ranks 2              on CPU ranks, over gloo: transport=torch only
python scripts/check_cluster.py --ranks 8 --list       what would be checked; starts nothing

Prints a row per check and writes JSON; what cannot run is skipped with the reason. The exit code is
1 if a check failed. See docs/dispatch_benchmark.md.
"""

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sidestream.commands import bench_dispatch, shared
from sidestream.config.availability import Machine
from sidestream.config.place import CONF
from sidestream.launch import torchrun
from sidestream.measure import environment
from sidestream.measure.cluster import REAL, Check, plan_checks
from sidestream.measure.dispatch_report import add_statistics, draw, print_tables, transports
from sidestream.measure.ranks import Failed, run_ranks
from sidestream.measure.shapes import parse_case
from sidestream.report.charts import png
from sidestream.tracking.folder import write_bytes_atomic, write_json_atomic

MODULE = "sidestream.measure.cluster"
SCHEMA_VERSION = 1
COLORS = {
    "ok": "green",
    "failed": "bold red",
    "skipped": "yellow",
    "would run": "green",
    "would skip": "yellow",
}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = shared.parser(__doc__, whole=True, allow_abbrev=False)
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="CPU ranks to start; torchrun decides it otherwise (default 2)")
    add("--list", action="store_true", help="say what would be checked and skipped, and end")
    add("--only", nargs="+", default=[], metavar="DISPATCHER", help="leave the others out")
    real = ", ".join(f"{device}: {shape}" for device, shape in REAL.items())
    add("--real", metavar="T,H,F,E,K", help=f"the real shape, T tokens per rank (default {real})")
    add("--dtype", choices=("bf16", "fp32"), default="bf16")
    add("--rounds", type=int, default=12, help="of the benchmark; 0: none (default 12)")
    add("--warmup", type=int, default=2, help="rounds before them that do not count (default 2)")
    add("--seed", type=shared.number(0, 2**63 - 1), default=1234)
    shared.add_torchrun(parser)
    add("--out", type=Path, default=Path("logs/check_cluster.json"), help="JSON; the picture lies beside it")
    parsed = parser.parse_args(argv)
    if parsed.ranks < 1 or parsed.rounds < 0 or parsed.warmup < 0:
        parser.error("--ranks must be at least 1, --rounds and --warmup at least 0")
    return parsed


def main(argv: list[str] | None = None, *, machine: Machine | None = None) -> int:
    options = arguments(argv)
    console = Console() if sys.stdout.isatty() else Console(width=180)
    try:
        machine, ranks = place(options, machine)
        checks = plan_checks(CONF, machine=machine, ranks=ranks, only=options.only)
        if options.list:
            show(listed(checks), console)
            print(f"{ranks} ranks on {machine.device_type}; real shape {real_text(options, machine)}")
            return 0
        shared.check_place(options.out)
        result = run_checks(options, checks, machine=machine, ranks=ranks)
    except (ValueError, Failed) as error:
        if not torchrun.follows():
            print(f"error: {error}", file=sys.stderr)
        return 1
    failed = any(row["state"] == "failed" for row in result["checks"])
    if not torchrun.follows():
        result["command"] = shared.command_line("scripts/check_cluster.py", argv)
        report(result, options, console)
    return int(failed)


def place(options: argparse.Namespace, machine: Machine | None) -> tuple[Machine, int]:
    """The machine as its ranks see it, and how many there are."""
    machine = Machine.here() if machine is None else machine
    on_cpu = options.device == "cpu" or not (torchrun.active() or options.list)
    ranks = torchrun.world()["world_size"] if torchrun.active() else options.ranks
    return (machine.on("cpu") if on_cpu else machine), ranks


def real_text(options: argparse.Namespace, machine: Machine) -> str:
    return options.real or REAL[machine.device_type]


def run_checks(
    options: argparse.Namespace, checks: Sequence[Check], *, machine: Machine, ranks: int
) -> dict[str, Any]:
    """Runs everything on all ranks; the same result on each."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    before = os.getloadavg()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    job = {
        "checks": [asdict(check) for check in checks],
        "real": asdict(parse_case(f"{real_text(options, machine)}@{ranks}").shape),
        "dtype": options.dtype,
        "rounds": options.rounds,
        "warmup": options.warmup,
        "seed": options.seed,
        "conf": str(CONF),
        "progress": str(options.out.resolve()),
        "malloc": "keep",
    }
    if torchrun.active():
        from sidestream.measure.existing import run_here  # brings torch

        group = run_here(job, module=MODULE, device=options.device, timeout_s=options.timeout)
    else:
        group = run_ranks(job, world_size=ranks, module=MODULE)
    (record,) = group["records"]
    return {
        "schema_version": SCHEMA_VERSION,
        "benchmark": "cluster",
        "status": "finished",
        "started": started,
        "host": ",".join(group.get("hosts", [platform.node()])),
        **environment.machine(),
        **environment.code(),
        "device": group.get("device", "cpu"),
        "nccl": group.get("nccl"),
        "versions": environment.versions(bench_dispatch.PACKAGES),
        "world_size": ranks,
        "precision": options.dtype,
        "load_average": {"before": list(before), "after": list(os.getloadavg())},
        "checks": record["checks"],
        "results": record["benchmark"],
    }


def listed(checks: Sequence[Check]) -> list[dict[str, Any]]:
    return [
        {
            **asdict(check),
            "state": "would skip" if check.why else "would run",
            "detail": check.why,
            "seconds": 0,
        }
        for check in checks
    ]


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table("dispatcher", "transport", "sizes", "case", "result", "found", "s")
    for row in rows:
        state, detail = Text(row["state"], style=COLORS[row["state"]]), Text(row["detail"], overflow="fold")
        cells = [row[name] for name in ("dispatcher", "transport", "mode", "size")]
        table.add_row(*cells, state, detail, f"{row['seconds']:.1f}" if row["seconds"] else "")
    console.print(table)


def report(result: dict[str, Any], options: argparse.Namespace, console: Console) -> None:
    """Prints, draws and writes what was found."""
    rows = result["checks"]
    show(rows, console)
    result["transport"] = transports(result)
    for record in result["results"]:
        add_statistics(record)
    write_json_atomic(options.out, result)
    if result["results"]:
        print_tables(result, console)
        write_bytes_atomic(options.out.with_suffix(".png"), png(draw(result)))
    for line in what_ran(rows, result["device"]):
        print(line)
    print(options.out)


def what_ran(rows: Sequence[dict[str, Any]], device: str) -> list[str]:
    """Which dispatcher ran on which transport, in words."""
    by_transport: dict[str, list[str]] = {}
    for row in rows:
        if row["state"] != "skipped":
            by_transport.setdefault(row["transport"], []).append(row["dispatcher"])
    ran = [
        f"ran on {device} with {'their libraries' if transport == 'library' else 'torch.distributed'}: "
        f"{', '.join(dict.fromkeys(names))}"
        for transport, names in by_transport.items()
    ]
    missing = [
        row["dispatcher"] for row in rows if row["transport"] == "library" and row["state"] == "skipped"
    ]
    return ran + ([f"NOT run with their libraries: {', '.join(dict.fromkeys(missing))}"] if missing else [])


def run() -> NoReturn:
    shared.run(main)
