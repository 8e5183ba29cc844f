"""Writes a comparison: compare.md, compare.csv, compare.png, compare.html."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from sidestream.compare import charts
from sidestream.compare.arms import Arm, Comparison
from sidestream.compare.figures import Figures, figures
from sidestream.compare.table import all_remarks, facts, markdown, table
from sidestream.report.charts import Chart, chart, png
from sidestream.report.page import Picture, Section, page
from sidestream.report.table import Cell, Column, Table, number
from sidestream.tracking import spreadsheet
from sidestream.tracking.folder import write_bytes_atomic
from sidestream.tracking.untrusted import Unreadable, read_bytes

WIDE, HALF, NARROW = 1150, 540, 330  # px of a chart: alone, beside another one, in a narrow window
LARGEST_PICTURE = 16 << 20  # bytes


def write(comparison: Comparison, out: Path) -> list[Path]:
    """Writes the four files to a folder, which is made if it is missing; returns their paths.

    Raises:
        OSError: the folder cannot be written.
    """
    all_figures = figures(comparison)
    # Everything is drawn before anything is written: the four files belong together.
    rows = [{"title": comparison.title, **of.flat} for of in all_figures]
    shown = page(
        title=comparison.what,
        also=comparison.also,
        facts=facts(comparison),
        sections=sections(comparison, all_figures),
    )
    contents = {
        "compare.md": markdown(comparison, all_figures).encode(),
        "compare.csv": spreadsheet.as_csv(rows).encode(),  # plain units: bytes, shares of 1
        "compare.png": png(charts.picture(comparison, all_figures)),
        "compare.html": shown.encode(),
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        write_bytes_atomic(out / name, content)
    return [out / name for name in contents]


def sections(comparison: Comparison, all_figures: Sequence[Figures]) -> list[Section]:
    """What the page shows, without what was recorded in no run."""
    said = all_remarks(comparison, all_figures)
    alone = [line for line in said if line.startswith("One seed")]
    found = [
        Section(
            lead="Select the head of a column to sort by it.",
            table=table(comparison, all_figures)[0],
            warnings=alone,
            notes=[line for line in said if line not in alone],
        )
    ]

    def drawn(draw: Callable[..., None], alt: str, *, wide: tuple[int, int], narrow: int) -> Chart:
        draws = partial(draw, comparison=comparison, all_figures=all_figures)
        return chart(draws, alt=alt, wide=wide, narrow=(NARROW, narrow))

    rows = len(all_figures)
    if charts.has_loss(all_figures):
        found.append(
            Section(
                heading="Loss over tokens",
                lead="Thick: validation, mean over seeds; band: from the lowest to the highest seed; thin: training "
                "loss. Nats per token. Equal curves lie on each other.",
                chart=drawn(
                    charts.losses,
                    "Loss over training tokens",
                    wide=(WIDE, 390 + 6 * rows),
                    narrow=290 + 18 * rows,
                ),
                numbers=losses(all_figures),
            )
        )
    if charts.has_difference(all_figures):
        one = any((d := of.differences["val_loss"]) is not None and d.low is None for of in all_figures)
        told = "One seed: no interval, and no proof." if one else "Lines: 95 % intervals, paired by seed."
        found.append(
            Section(
                heading="Validation loss minus baseline",
                lead=f"At equal tokens; left of zero is better. {told}",
                chart=drawn(
                    charts.differences,
                    "Difference of the loss to the baseline",
                    wide=(HALF, 12 + 44 * rows),
                    narrow=12 + 44 * rows,
                ),
                half=True,
            )
        )
    if charts.has_speed(all_figures):
        found.append(
            Section(
                heading="Tokens per second over the baseline's",
                lead="Medians of the ratios by seed; lines: smallest to largest. No fair timing: see the notes.",
                chart=drawn(
                    charts.speeds,
                    "Tokens per second over the baseline's",
                    wide=(HALF, 56 + 44 * rows),
                    narrow=56 + 44 * rows,
                ),
                half=True,
            )
        )
    if timelines := [picture for arm in comparison.arms if (picture := timeline(comparison, arm))]:
        found.append(
            Section(
                heading="Timelines of one MoE unit",
                lead="Recorded spans: what each rank computes and what travels, serial above, overlapped below. "
                "The time axes differ. Select a picture to enlarge it.",
                pictures=timelines,
            )
        )
    if any(arm.runs[0].load for arm in comparison.arms):
        found.append(
            Section(
                heading="Load of the experts",
                lead="Routes of an expert over the mean of its layer: white is even, red is more, blue is less. One "
                "scale for all pictures.",
                pictures=[
                    Picture(
                        name=arm.label,
                        told=f"seed {arm.runs[0].seed}",
                        alt=f"Load of the experts of {arm.name}",
                        content=charts.load_map(arm.runs[0].load),
                        kind="image/png",
                        color=comparison.color(arm),
                    )
                    for arm in comparison.arms
                    if arm.runs[0].load
                ],
            )
        )
    if comparison.left_out:
        left_out = Table([Column("folder", code=True), "why"])
        for item in comparison.left_out:
            left_out.add(item.name, item.reason)
        found.append(Section(heading="Left out", table=left_out))
    return found


def losses(all_figures: Sequence[Figures]) -> Table:
    """What the loss chart shows: validation losses, else training losses, by training tokens."""
    shown = "val_loss" if any(of.curves["val_loss"].tokens for of in all_figures) else "train_loss"
    curves = [of.curves[shown] for of in all_figures]
    found = Table(["training tokens", *(Column(of.arm.label, number=True) for of in all_figures)])
    for tokens in sorted({tokens for curve in curves for tokens in curve.tokens}):
        cells = [Cell("-")] * len(curves)
        for n, curve in enumerate(curves):
            if tokens in curve.tokens:
                at = curve.tokens.index(tokens)
                mean, low, high = (number(of[at], 4) for of in (curve.mean, curve.low, curve.high))
                cells[n] = Cell(mean, detail="" if low == high else f"{low} to {high}")
        found.add(f"{tokens:,}", *cells)
    return found


def timeline(comparison: Comparison, arm: Arm) -> Picture | None:
    """The overlap of the arm's first run that has one, else of a measurement with the same choices."""
    run = next((run for run in (*arm.runs, arm.illustration) if run is not None and run.picture), None)
    if run is None or run.picture is None:
        return None
    try:
        content = read_bytes(run.picture, inside=run.picture.parent, limit=LARGEST_PICTURE)
    except Unreadable:
        return None
    part, told = run.part("overlap"), run.name
    if part.get("e_hide") is not None:
        told = f"E_hide {number(part['e_hide'], 2)}, at most {number(part.get('bound'), 2)}"
    if run is arm.illustration:
        told += "; a measurement of its own" + (f", with {arm.caveat}" if arm.caveat else "")
    return Picture(
        name=arm.label,
        told=told,
        alt=f"Timeline of {arm.name}",
        content=content,
        kind="image/svg+xml" if run.picture.suffix == ".svg" else "image/png",
        color=comparison.color(arm),
    )
