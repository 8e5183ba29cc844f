"""The one table: its columns, and the table as Markdown and CSV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sidestream.compare.arms import Comparison
from sidestream.compare.figures import BUSY, Figures, remarks
from sidestream.tracking import spreadsheet
from sidestream.tracking.markdown import code, text

MINUS = "\u2212"
UNKNOWN = "-"


@dataclass(frozen=True)
class Cell:
    """What one place of the table shows.

    Attributes:
        text: `-` where nothing is known.
        value: To sort by; None sorts last.
        detail: Smaller, such as a spread; empty if there is none.
    """

    text: str
    value: float | str | None = None
    detail: str = ""


@dataclass(frozen=True)
class Column:
    """A column of the table.

    Attributes:
        key: In the address of a sorted page.
        head: With the unit.
        meaning: One sentence.
        cell: From the figures of an arm.
        number: Aligned to the right.
    """

    key: str
    head: str
    meaning: str
    cell: Callable[[Figures], Cell]
    number: bool = True


def number(value: float | None, digits: int = 0, *, sign: bool = False) -> str:
    """Digits after the point, thousands apart, a true minus sign."""
    if value is None:
        return UNKNOWN
    text = f"{value:{'+' if sign else ''},.{digits}f}"
    return text.replace("-", MINUS)


def _ms(value: float | None) -> str:
    """Three significant digits: times go from microseconds to minutes."""
    return number(value, 0 if (value or 0) >= 100 else 1 if abs(value or 0) >= 10 else 2)


def _plain(key: str, *, digits: int = 0, scale: float = 1.0) -> Callable[[Figures], Cell]:
    def cell(of: Figures) -> Cell:
        value = of.flat[key]
        return Cell(number(None if value is None else value * scale, digits), value)

    return cell


def _arm(of: Figures) -> Cell:
    mark = " †" if of.arm.changes_model else ""
    return Cell(of.arm.name + mark, of.arm.name, "baseline" if of.flat["baseline"] else "")


def _ran_on(of: Figures) -> Cell:
    flat = of.flat
    link = flat["link"] if flat["link_gbps"] is None else f"{flat['link']} {flat['link_gbps']:g} Gbit/s"
    ranks = f"{flat['world_size']} \u00d7 {flat['device']}" if flat["world_size"] is not None else ""
    size = f"EP {flat['expert_parallel_size']}" if flat["expert_parallel_size"] is not None else ""
    known = [str(part) for part in (flat["transport"], link, ranks, size) if part]
    return Cell(known[0] if known else UNKNOWN, " ".join(known) or None, ", ".join(known[1:]))


def ratio_text(of: Figures) -> str:
    """The median ratio to the baseline with the smallest and largest of the seeds, or why there is none."""
    ratio, low, high = (of.flat[f"tokens_per_second_ratio{part}"] for part in ("", "_min", "_max"))
    if of.flat["timing"] == "busy":
        return "busy machine"
    span = f"{low:.2f} to {high:.2f}" if low is not None and low < high else ""
    if of.flat["timing"]:
        return "not told apart" + (f" ({span})" if span else "")
    if ratio is None:
        return ""
    return f"\u00d7 {ratio:.2f}" + (f" ({span})" if span else "")


def _speed(of: Figures) -> Cell:
    value = of.flat["tokens_per_second"]
    busy = " \u2021" if (of.flat["waited_share"] or 0.0) > BUSY else ""
    return Cell(number(value) + busy, value, ratio_text(of))


def _step(of: Figures) -> Cell:
    low, high = of.flat["step_ms_q1"], of.flat["step_ms_q3"]
    return Cell(
        _ms(of.flat["step_ms"]), of.flat["step_ms"], "" if low is None else f"{_ms(low)} to {_ms(high)}"
    )


def _exposed(of: Figures) -> Cell:
    share = of.flat["exposed_share"]
    return Cell(
        _ms(of.flat["exposed_ms"]),
        of.flat["exposed_ms"],
        "" if share is None else f"{number(100 * share)} %",
    )


def _e_hide(of: Figures) -> Cell:
    bound = of.flat["e_hide_bound"]
    return Cell(
        number(of.flat["e_hide"], 2),
        of.flat["e_hide"],
        "" if bound is None else f"of {number(bound, 2)}",
    )


def _loss(of: Figures) -> Cell:
    spread = of.flat["val_loss_sd"]
    return Cell(
        number(of.flat["val_loss"], 4), of.flat["val_loss"], "" if spread is None else f"({spread:.4f})"
    )


def _difference(loss: str) -> Callable[[Figures], Cell]:
    def cell(of: Figures) -> Cell:
        found = of.differences[loss]
        if found is None:
            return Cell(UNKNOWN)
        if found.mean == found.low == found.high == 0.0:
            return Cell("0", 0.0, "identical")
        if found.low is None:
            return Cell(number(found.mean, 4, sign=True), found.mean, "1 seed")
        bounds = f"{number(found.low, 4, sign=True)} to {number(found.high, 4, sign=True)}"
        return Cell(number(found.mean, 4, sign=True), found.mean, bounds)

    return cell


COLUMNS = (
    Column("arm", "choices", "What the arms differ in.", _arm, False),
    Column(
        "ran_on",
        "transport, link, ranks",
        "What moved the rows; the link, which is the machine's own or an emulated one; ranks and device, and how many "
        "ranks share a copy of the experts (EP).",
        _ran_on,
        False,
    ),
    Column(
        "tokens_per_second",
        "tokens/s",
        "Median, over all ranks; \u00d7: median ratio to the baseline by seed, smallest and largest.",
        _speed,
    ),
    Column("step_ms", "step, ms", "Median, and first to third quartile.", _step),
    Column(
        "exposed_ms",
        "exposed, ms",
        "What exchanges still add to the compute of one MoE unit, and its share of the unit.",
        _exposed,
    ),
    Column(
        "e_hide",
        "E_hide",
        "Of the time that could be hidden, the share that was; of: the most it can be.",
        _e_hide,
    ),
    Column(
        "bytes_on_wire",
        "sent, MB",
        "By the dispatchers of all ranks in the whole run.",
        _plain("bytes_on_wire", digits=1, scale=1e-6),
    ),
    Column("dropped", "drops", "Routes lost because a budget was full, all seeds.", _plain("dropped")),
    Column("replays", "replays", "Steps repeated because a budget was full, all seeds.", _plain("replays")),
    Column(
        "mfu",
        "MFU, %",
        "Model FLOPs per second over the peak of all devices.",
        _plain("mfu", digits=1, scale=100),
    ),
    Column(
        "peak_memory",
        "peak, MiB",
        "Peak memory of the largest rank.",
        _plain("peak_memory_bytes", scale=2**-20),
    ),
    Column("val_loss", "val. loss", "Validation loss at equal tokens, mean and standard deviation.", _loss),
    Column(
        "val_loss_difference",
        "Δ val. loss",
        "To the baseline, paired by seed, with 95 % interval.",
        _difference("val_loss"),
    ),
    Column(
        "train_loss_difference",
        "Δ train loss",
        "As Δ val. loss, for the training batch of the last common record.",
        _difference("train_loss"),
    ),
)


def columns(all_figures: Sequence[Figures]) -> tuple[list[Column], list[str]]:
    """The columns with at least one value, and the heads of the others."""
    kept: list[Column] = []
    empty: list[Column] = []
    for column in COLUMNS:
        known = any(column.cell(of).value is not None for of in all_figures)
        (kept if known else empty).append(column)
    return kept, [column.head for column in empty]


def facts(comparison: Comparison) -> dict[str, str]:
    """What all runs share, for the head of the outputs: name -> text."""
    first = comparison.arms[0].runs[0]
    differing = {difference.key for difference in comparison.meant}
    metrics = first.part("metrics")
    tokens = metrics.get("tokens")
    values: dict[str, Any] = {
        "baseline": comparison.baseline.name,
        "seeds": ", ".join(str(run.seed) for run in comparison.arms[0].runs),
        "tokens": None if tokens is None else f"{tokens:,}",
        "precision": first.result.get("precision"),
        "processor": first.env.get("cpu") or first.env.get("gpu"),
        "torch": (first.result.get("versions") or {}).get("torch"),
        "commit": _commit(first.result.get("commit")),
    }
    hidden = {"cpu": "processor", "gpu": "processor"}
    gone = {hidden.get(key, key) for key in differing}
    return {name: str(value) for name, value in values.items() if value is not None and name not in gone}


def _commit(commit: str | None) -> str | None:
    if commit is None:
        return None
    name, _, dirty = commit.partition("-")
    return name[:12] + (f"-{dirty}" if dirty else "")


def all_remarks(comparison: Comparison, all_figures: Sequence[Figures]) -> list[str]:
    """The notes below the table."""
    _, empty = columns(all_figures)
    absent = [f"Recorded in no run, so not shown: {'; '.join(empty)}."] if empty else []
    return [*remarks(comparison, all_figures), *absent]


def markdown(comparison: Comparison, all_figures: Sequence[Figures]) -> str:
    """compare.md: title, what is shared, the table, notes, what was left out."""
    kept, _ = columns(all_figures)
    lines = [f"# {text(comparison.title)}", ""]
    lines += [f"* {name}: {text(value)}" for name, value in facts(comparison).items()]
    lines += ["", f"| {' | '.join(column.head for column in kept)} |"]
    lines.append("|" + "|".join("---:" if column.number else "---" for column in kept) + "|")
    for of in all_figures:
        cells = [column.cell(of) for column in kept]
        texts = [text(f"{cell.text} {_bracketed(cell.detail)}".strip()) for cell in cells]
        lines.append(f"| {' | '.join(texts)} |")
    lines += ["", *(f"* {text(line)}" for line in all_remarks(comparison, all_figures))]
    if comparison.left_out:
        items = (f"* {code(item.name)}: {text(item.reason)}" for item in comparison.left_out)
        lines += ["", "Left out:", "", *items]
    return "\n".join(lines) + "\n"


def _bracketed(detail: str) -> str:
    return detail if not detail or detail.startswith("(") else f"({detail})"


def as_csv(comparison: Comparison, all_figures: Sequence[Figures]) -> str:
    """compare.csv: a line per arm in plain units (bytes, shares of 1), the title in its first column."""
    return spreadsheet.as_csv([{"title": comparison.title, **of.flat} for of in all_figures])
