"""Many runs of scripts/measure_overlap.py as one small record and one table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sidestream.measure.instrument import facts, page
from sidestream.profiling.bench import BOTH
from sidestream.report.table import Column, Table, numbers

_SHARED = (
    "device", "world_size", "expert_parallel_size", "transport", "precision", "scope", "rounds", "warmup", "shape",
    "threads_per_rank", "cpu", "cpu_count", "commit", "dirty", "versions",
)  # fmt: skip
_FIGURES = ("e_hide", "bound", "reached", "exposed", "contention", "comm_share", "speedup")


def collect(reports: Sequence[Path], *, command: str) -> dict[str, Any]:
    """The figures of forward and backward together.

    Args:
        reports: Files `overlap.json`.
        command: That made them.

    Raises:
        ValueError: They differ in more than schedule, compute and link.
    """
    records = [json.loads(path.read_text(encoding="utf-8")) for path in reports]
    shared = {name: records[0][name] for name in _SHARED}
    for path, record in zip(reports, records):
        different = [name for name in _SHARED if record[name] != shared[name]]
        if different:
            raise ValueError(
                f"{path}: another {different[0]} than in {reports[0]}; expected runs of one sweep"
            )
    return {"measurement": "overlap_matrix", "command": command, **shared, "runs": [_run(r) for r in records]}


def _run(record: dict[str, Any]) -> dict[str, Any]:
    passes = record["passes"]
    both = passes[BOTH] if BOTH in passes else next(iter(passes.values()))
    return {
        "schedule": record["schedule"]["name"],
        "compute": record["compute"],
        "asked_comm_share": record["comm_share"],
        "link": record["link"],
        "link_gbps": record["link_gbps"],
        "ms": {arm: times["median"] for arm, times in both["ms"].items()},
        **{name: both[name] for name in _FIGURES},
        "load_before": record["load_average"]["before"][0],
    }


def markdown(result: dict[str, Any]) -> str:
    """The table of a page, and the facts under it."""
    figures = numbers("communication", "serial, ms", "overlapped, ms", "E_hide", "at most", "reached")
    table = Table([Column("schedule", code=True), "compute", *figures])
    for run in result["runs"]:
        table.add(
            run["schedule"],
            run["compute"],
            f"{run['comm_share']:.0%}",
            *(f"{run['ms'][arm]:.0f}" for arm in ("serial", "overlapped")),
            *(f"{run[name]:.2f}" for name in ("e_hide", "bound", "reached")),
        )
    loads = [run["load_before"] for run in result["runs"]]
    said = facts(
        result,
        ranks=f"{result['world_size']} ranks, one thread and core a rank",
        load_average=f"{min(loads):.1f} to {max(loads):.1f}",
        measured=f"{result['rounds']} rounds",
        emulated="the link (throttled); with compute `sleep` also the length of attention, feed-forward and experts",
    )
    return page(table, said)
