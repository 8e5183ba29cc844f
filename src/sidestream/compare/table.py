"""The one table of a comparison, and what is said around it: of compare.md, compare.csv and the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sidestream.compare.arms import Comparison
from sidestream.compare.figures import BUSY, Figures, remarks
from sidestream.report.table import Cell, Column, Table, code, number, short_commit, text

# Head -> key in the address of the page, meaning.
FIGURES = {
    "tokens/s": (
        "tokens_per_second",
        "Median, over all ranks; \u00d7: median ratio to the baseline by seed, smallest and largest.",
    ),
    "step, ms": ("step_ms", "Median, and first to third quartile."),
    "exposed, ms": (
        "exposed_ms",
        "What exchanges still add to the compute of one MoE unit, and its share of the unit.",
    ),
    "E_hide": (
        "e_hide",
        "Of the time that could be hidden, the share that was; of: the most it can be.",
    ),
    "sent, MB": ("bytes_on_wire", "By the dispatchers of all ranks in the whole run."),
    "drops": ("dropped", "Routes lost because a budget was full, all seeds."),
    "replays": ("replays", "Steps repeated because a budget was full, all seeds."),
    "MFU, %": ("mfu", "Model FLOPs per second over the peak of all devices."),
    "peak, MiB": ("peak_memory", "Peak memory of the largest rank."),
    "val. loss": ("val_loss", "Validation loss at equal tokens, mean and standard deviation."),
    "Δ val. loss": ("val_loss_difference", "To the baseline, paired by seed, with 95 % interval."),
    "Δ train loss": (
        "train_loss_difference",
        "As Δ val. loss, for the training batch of the last common record.",
    ),
}
COLUMNS = (
    Column("choices", key="arm", meaning="What the arms differ in."),
    Column(
        "transport, link, ranks",
        key="ran_on",
        meaning="What moved the rows; the link, which is the machine's own or an emulated one; ranks and device, and "
        "how many ranks share a copy of the experts (EP).",
    ),
    *(Column(head, True, key=key, meaning=meaning) for head, (key, meaning) in FIGURES.items()),
)


def cells(of: Figures) -> list[Cell]:
    """The row of an arm: a cell for each of `COLUMNS`."""
    flat = of.flat

    def plain(key: str, digits: int = 0, scale: float = 1.0, detail: str = "") -> Cell:
        value = flat[key]
        return Cell(number(None if value is None else value * scale, digits), value, detail)

    link = flat["link"] if flat["link_gbps"] is None else f"{flat['link']} {flat['link_gbps']:g} Gbit/s"
    ranks = None if flat["world_size"] is None else f"{flat['world_size']} \u00d7 {flat['device']}"
    size = None if flat["expert_parallel_size"] is None else f"EP {flat['expert_parallel_size']}"
    ran_on = [str(part) for part in (flat["transport"], link, ranks, size) if part] or ["-"]
    busy = " \u2021" if (flat["waited_share"] or 0.0) > BUSY else ""
    low, high = (milliseconds(flat[key]) for key in ("step_ms_q1", "step_ms_q3"))
    share, bound, spread = flat["exposed_share"], flat["e_hide_bound"], flat["val_loss_sd"]
    return [
        Cell(flat["arm"] + of.arm.mark, flat["arm"], "baseline" if flat["baseline"] else ""),
        Cell(ran_on[0], None if ran_on == ["-"] else " ".join(ran_on), ", ".join(ran_on[1:])),
        Cell(number(flat["tokens_per_second"]) + busy, flat["tokens_per_second"], of.ratio_text),
        Cell(milliseconds(flat["step_ms"]), flat["step_ms"], "" if low == "-" else f"{low} to {high}"),
        Cell(
            milliseconds(flat["exposed_ms"]),
            flat["exposed_ms"],
            "" if share is None else f"{number(100 * share)} %",
        ),
        plain("e_hide", 2, detail="" if bound is None else f"of {number(bound, 2)}"),
        plain("bytes_on_wire", 1, 1e-6),
        plain("dropped"),
        plain("replays"),
        plain("mfu", 1, 100),
        plain("peak_memory_bytes", 0, 2**-20),
        plain("val_loss", 4, detail="" if spread is None else f"({spread:.4f})"),
        difference(of, "val_loss"),
        difference(of, "train_loss"),
    ]


def milliseconds(value: float | None) -> str:
    """Three significant digits: times go from microseconds to minutes."""
    size = abs(value or 0)
    return number(value, 0 if size >= 100 else 1 if size >= 10 else 2)


def difference(of: Figures, loss: str) -> Cell:
    """A loss minus that of the baseline, with its interval."""
    found = of.differences[loss]
    if found is None:
        return Cell("-")
    if found.mean == found.low == found.high == 0.0:
        return Cell("0", 0.0, "identical")
    mean, low, high = (number(value, 4, sign=True) for value in (found.mean, found.low, found.high))
    return Cell(mean, found.mean, "1 seed" if found.low is None else f"{low} to {high}")


def table(comparison: Comparison, all_figures: Sequence[Figures]) -> tuple[Table, list[str]]:
    """The columns with at least one value, and the heads of the others."""
    rows = [cells(of) for of in all_figures]
    kept = [n for n in range(len(COLUMNS)) if any(row[n].value is not None for row in rows)]
    found = Table([COLUMNS[n] for n in kept])
    for of, row in zip(all_figures, rows):
        color = comparison.color(of.arm)
        found.add(*(row[n] for n in kept), strong=of.flat["baseline"], color=color)
    return found, [column.head for n, column in enumerate(COLUMNS) if n not in kept]


def facts(comparison: Comparison) -> dict[str, str]:
    """What all runs share, for the head of the outputs: name -> text."""
    first = comparison.arms[0].runs[0]
    tokens, commit = first.part("metrics").get("tokens"), first.result.get("commit")
    values: dict[str, Any] = {
        "baseline": comparison.baseline.name,
        "seeds": ", ".join(str(run.seed) for run in comparison.arms[0].runs),
        "tokens": None if tokens is None else f"{tokens:,}",
        "precision": first.result.get("precision"),
        "processor": first.env.get("cpu") or first.env.get("gpu"),
        "torch": (first.result.get("versions") or {}).get("torch"),
        "commit": None if commit is None else short_commit(commit),
    }
    hidden = {"cpu": "processor", "gpu": "processor"}
    gone = {hidden.get(difference.key, difference.key) for difference in comparison.meant}
    return {name: str(value) for name, value in values.items() if value is not None and name not in gone}


def all_remarks(comparison: Comparison, all_figures: Sequence[Figures]) -> list[str]:
    """The notes below the table."""
    _, empty = table(comparison, all_figures)
    absent = [f"Recorded in no run, so not shown: {'; '.join(empty)}."] if empty else []
    return [*remarks(comparison, all_figures), *absent]


def markdown(comparison: Comparison, all_figures: Sequence[Figures]) -> str:
    """compare.md: title, what is shared, the table, notes, what was left out."""
    lines = [f"# {text(comparison.title)}", ""]
    lines += [f"* {name}: {text(value)}" for name, value in facts(comparison).items()]
    lines += ["", table(comparison, all_figures)[0].markdown(), ""]
    lines += [f"* {text(line)}" for line in all_remarks(comparison, all_figures)]
    if comparison.left_out:
        lines += ["", "Left out:", ""]
        lines += [f"* {code(item.name)}: {text(item.reason)}" for item in comparison.left_out]
    return "\n".join(lines) + "\n"
