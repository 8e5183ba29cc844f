"""Tokens per second, memory and capture time of training steps with and without a step graph, in one run.

python scripts/bench_graph.py [--ranks 2] [--rounds 30] [--out FILE] [--case "OVERRIDES" ...]

A case is overrides of train.py in one string; without any, `tiny` with three dispatchers and the shortcut. On a CPU the
graph is a tape, see docs/step_graphs.md.
"""

import shlex
import sys
from pathlib import Path
from typing import NoReturn

from sidestream.commands import shared
from sidestream.config.place import CONF
from sidestream.measure import graph_report, instrument
from sidestream.measure.ranks import Failed, run_ranks

MODULE = "sidestream.measure.graph_bench"
FACTOR = "dispatcher.capacity_factor=1.5"
CASES = (
    f"dispatcher=nccl_ep {FACTOR}",
    f"dispatcher=alltoall {FACTOR}",
    f"dispatcher=nccl_ep {FACTOR} overlap=shortcut overlap.slot=1",
)


def main(argv: list[str] | None = None) -> int:
    parser = shared.parser(__doc__)
    parser.add_argument("--ranks", type=shared.number(1, 1024), default=2)
    parser.add_argument("--rounds", type=shared.number(1), default=30)
    parser.add_argument("--warmup", type=shared.number(0), default=3)
    parser.add_argument("--case", action="append", metavar="OVERRIDES", help="in one string; may be repeated")
    parser.add_argument("--out", type=Path, default=Path("logs/bench_graph/graph.json"), metavar="FILE")
    options = parser.parse_args(argv)
    shared.check_place(options.out)
    command = shared.command_line("scripts/bench_graph.py", argv)
    head = instrument.begin("graph", command=command, packages=("torch",))
    cases = [shlex.split(case) for case in options.case or CASES]
    job = {"conf": str(CONF), "cases": cases, "rounds": options.rounds, "warmup": options.warmup}
    try:
        found = run_ranks({**job, "malloc": "keep"}, world_size=options.ranks, module=MODULE)
    except Failed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    result = instrument.end(
        head,
        backend="tape",
        rounds=options.rounds,
        warmup_rounds=options.warmup,
        pinned=found["pinned"],
        results=found["records"],
    )
    instrument.write(result, options.out, graph_report.print_tables)
    return 0


def run() -> NoReturn:
    shared.run(main)
