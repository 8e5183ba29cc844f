"""From records to figures: the table of the step graphs' benchmark, in the terminal and on its page. No torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sidestream.measure.instrument import facts, load, page
from sidestream.report.table import Column, Table, numbers, say

if TYPE_CHECKING:
    from rich.console import Console


def table(result: dict[str, Any]) -> Table:
    """A row per case: speed and memory of the graph over those of eager steps."""
    found = Table(
        [
            Column("case", code=True),
            "ranks",
            *numbers("tokens/s eager", "tokens/s graph", "tokens/s, graph over eager"),
            *numbers("quartiles", "memory", "capture", "capture again"),
        ]
    )
    for record in result["results"]:
        speed, over, memory = record["tokens_per_second"], record["speedup"], record["peak_memory_bytes"]
        found.add(
            " ".join(record["case"]),
            str(record["world_size"]),
            *(f"{speed[kind]:.0f}" for kind in ("eager", "graph")),
            f"{over['median']:.2f}",
            f"{over['q1']:.2f} to {over['q3']:.2f}",
            f"{memory['graph'] / memory['eager']:.2f} x" if memory["eager"] and memory["graph"] else "-",
            *(f"{record[name]:.2f} s" for name in ("capture_seconds", "recapture_seconds")),
        )
    return found


def print_tables(result: dict[str, Any], console: Console) -> None:
    """All cases, and how busy the machine was."""
    table(result).show(console)
    say(f"Medians of {result['rounds']} rounds of whole steps. {load(result)}", console)


def markdown(result: dict[str, Any]) -> str:
    """The table of a page, and the facts under it."""
    said = facts(
        result,
        ranks=f"{result['results'][0]['world_size']} ranks, one thread and core a rank",
        measured=f"{result['rounds']} rounds of whole steps of `tiny`, in changing order",
        emulated="a CUDA graph, by the tape",
    )
    return page(table(result).without("ranks", "tokens/s eager", "tokens/s graph"), said)
