"""Many runs of scripts/measure_overlap.py as one small record and one table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sidestream.profiling.bench import BOTH
from sidestream.tracking.markdown import notes, table

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
    """The table, and below it how it was made."""
    columns = (
        "schedule",
        "compute",
        "communication",
        "serial, ms",
        "overlapped, ms",
        "E_hide",
        "at most",
        "reached",
    )
    rows: list[Sequence[str]] = []
    for run in result["runs"]:
        cells = [
            f"`{run['schedule']}`",
            run["compute"],
            f"{run['comm_share']:.0%}",
            f"{run['ms']['serial']:.0f}",
            f"{run['ms']['overlapped']:.0f}",
            f"{run['e_hide']:.2f}",
            f"{run['bound']:.2f}",
            f"{run['reached']:.2f}",
        ]
        rows.append(cells)
    load = [run["load_before"] for run in result["runs"]]
    facts = [
        f"Command: `{result['command']}`",
        f"Machine: {result['cpu']}, {result['world_size']} ranks, one thread and core a rank, torch "
        f"{result['versions']['torch']}, {result['precision']}; load average {min(load):.1f} to {max(load):.1f}",
        f"Commit `{result['commit'][:12]}{'-dirty' if result['dirty'] else ''}`; {result['rounds']} rounds",
        "Emulated: the link (throttled); with compute `sleep` also the length of attention, feed-forward and experts",
    ]
    return "\n".join([*table(columns, rows), "", *notes(facts)])
