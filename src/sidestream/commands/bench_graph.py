"""Tokens per second, memory and capture time of training steps with and without a step graph, in one run.

python scripts/bench_graph.py [--ranks 2] [--rounds 30] [--out FILE] [--case "OVERRIDES" ...]

A case is overrides of train.py in one string; without any, `tiny` with three dispatchers and the shortcut. On a CPU the
graph is a tape, see docs/step_graphs.md.
"""

import os
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from sidestream.commands import shared
from sidestream.config.place import CONF
from sidestream.measure import environment
from sidestream.measure.ranks import Failed, run_ranks
from sidestream.tracking.folder import write_json_atomic

MODULE = "sidestream.measure.graph_bench"
FACTOR = "dispatcher.capacity_factor=1.5"
CASES = (
    f"dispatcher=nccl_ep {FACTOR}",
    f"dispatcher=alltoall {FACTOR}",
    f"dispatcher=nccl_ep {FACTOR} overlap=shortcut overlap.slot=1",
)


def main(argv: list[str] | None = None) -> int:
    parser = shared.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--case", action="append", metavar="OVERRIDES", help="in one string; may be repeated")
    parser.add_argument("--out", type=Path, default=Path("logs/bench_graph/graph.json"), metavar="FILE")
    options = parser.parse_args(argv)
    shared.check_place(options.out)
    before = os.getloadavg()
    cases = [shlex.split(case) for case in options.case or CASES]
    job = {"conf": str(CONF), "cases": cases, "rounds": options.rounds, "warmup": options.warmup}
    try:
        found = run_ranks({**job, "malloc": "keep"}, world_size=options.ranks, module=MODULE)
    except Failed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    result = {
        "schema_version": 1,
        "benchmark": "graph",
        "command": shared.command_line("scripts/bench_graph.py", argv),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **environment.machine(),
        **environment.code(),
        "versions": environment.versions(("torch",)),
        "backend": "tape",
        "rounds": options.rounds,
        "pinned": found["pinned"],
        "load_average": {"before": list(before), "after": list(os.getloadavg())},
        "results": found["records"],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(options.out, result)
    show(result, Console() if sys.stdout.isatty() else Console(width=150))
    print(options.out)
    return 0


def show(result: dict[str, Any], console: Console) -> None:
    table = Table("case", "ranks", "tokens/s eager", "graph", "graph / eager", "memory", "capture again")
    for record in result["results"]:
        speed, ratio, memory = record["tokens_per_second"], record["speedup"], record["peak_memory_bytes"]
        grown = f"{memory['graph'] / memory['eager']:.2f} x" if memory["eager"] and memory["graph"] else "-"
        table.add_row(
            " ".join(record["case"]),
            str(record["world_size"]),
            f"{speed['eager']:.0f}",
            f"{speed['graph']:.0f}",
            f"{ratio['median']:.3f} ({ratio['q1']:.3f} to {ratio['q3']:.3f})",
            grown,
            f"{record['recapture_seconds']:.2f} s",
        )
    console.print(table)


def run() -> NoReturn:
    shared.run(main)
