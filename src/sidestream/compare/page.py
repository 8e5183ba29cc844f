"""compare.html: one file with everything in it, sortable, for wide and narrow windows, light and dark."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from html import escape

from sidestream.compare import charts
from sidestream.compare.arms import Arm, Comparison
from sidestream.compare.figures import Figures
from sidestream.compare.page_parts import SCRIPT, STYLE
from sidestream.compare.runs import Run
from sidestream.compare.table import Column, all_remarks, columns, facts, number
from sidestream.tracking.untrusted import Unreadable, read_bytes

WIDE, NARROW = (1150, 360), (330, 260)  # px of the loss chart
LARGEST_PICTURE = 16 << 20  # bytes
HALF = 540  # px of a chart beside another one
# Scripts and styles of the page itself, pictures inside it, and nothing from anywhere else.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(comparison: Comparison, all_figures: Sequence[Figures], *, load_maps: Mapping[str, bytes]) -> str:
    """The whole page.

    Args:
        load_maps: Name of an arm -> PNG of its experts' load; arms may be missing.
    """
    sections = [
        _table(comparison, all_figures),
        _losses(comparison, all_figures),
        _differences(comparison, all_figures),
        _timelines(comparison),
        _loads(comparison, load_maps),
        _left_out(comparison),
    ]
    described = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>"
        for name, text in facts(comparison).items()
    )
    plain, also, rest = comparison.title.partition("; the runs also differ in ")
    heading = escape(plain) + (f'<span class="also">{escape(also + rest)}</span>' if also else "")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(comparison.title)}</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<h1>{heading}</h1>
<dl>{described}</dl>
</header>
<main>
{"".join(section for section in sections if section)}
</main>
<dialog aria-label="Picture in full size"><img alt=""></dialog>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _table(comparison: Comparison, all_figures: Sequence[Figures]) -> str:
    kept, _ = columns(all_figures)
    heads = "".join(
        f'<th scope="col" data-key="{column.key}"{_number(column)}>'
        f'<button type="button" title="{escape(column.meaning)}">{escape(column.head)}</button></th>'
        for column in kept
    )
    rows = "".join(_row(comparison, of, kept) for of in all_figures)
    notes = "".join(
        f'<li class="warning">{escape(line)}</li>'
        if line.startswith("One seed")
        else f"<li>{escape(line)}</li>"
        for line in all_remarks(comparison, all_figures)
    )
    return (
        '<section><p class="lead">Select the head of a column to sort by it.</p>'
        '<div class="scroll" tabindex="0" role="region" aria-label="Table of the arms">'
        f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
        f'<ul class="notes">{notes}</ul></section>'
    )


def _number(column: Column) -> str:
    return ' class="number"' if column.number else ""


def _row(comparison: Comparison, of: Figures, kept: Sequence[Column]) -> str:
    parts = []
    for column in kept:
        cell = column.cell(of)
        value = escape("" if cell.value is None else str(cell.value))
        detail = f"<small>{escape(_glued(cell.detail))}</small>" if cell.detail else ""
        if column is kept[0]:
            choices = "".join(_choice(part) for part in cell.text.replace(" †", "\u00a0†").split(" "))
            kind = charts.color_class(comparison, of.arm)
            parts.append(f'<th scope="row" class="{kind}" data-value="{value}">{choices}{detail}</th>')
        else:
            parts.append(f'<td{_number(column)} data-value="{value}">{escape(cell.text)}{detail}</td>')
    baseline = ' class="baseline"' if of.flat["baseline"] else ""
    return f"<tr{baseline}>{''.join(parts)}</tr>"


def _glued(detail: str) -> str:
    """Breaks only where a line may end in a narrow column: not inside a number with its unit, nor behind `to`."""
    detail = re.sub(r"\(.*?\)", lambda found: found.group().replace(" ", "\u00a0"), detail)
    return (
        detail.replace(" to ", " to\u00a0")
        .replace(" Gbit", "\u00a0Gbit")
        .replace(" \u00d7 ", "\u00a0\u00d7\u00a0")
    )


def _choice(part: str) -> str:
    key, _, value = part.partition("=")
    return f'<span class="choice"><span>{escape(key)}=</span>{escape(value)}</span>'


def _losses(comparison: Comparison, all_figures: Sequence[Figures]) -> str:
    drawn = [
        (name, charts.loss_chart(comparison, all_figures, width=width, height=height))
        for name, (width, height) in (("wide", WIDE), ("narrow", NARROW))
    ]
    if not drawn[0][1]:
        return ""
    key = "".join(
        f'<li class="{charts.color_class(comparison, of.arm)}"><span>{_name(of.arm)}</span></li>'
        for of in all_figures
    )
    return (
        "<section><h2>Loss over tokens</h2>"
        '<p class="lead">Thick: validation, mean over seeds; band: from the lowest to the highest seed; thin: training '
        "loss. Nats per token. Equal curves lie on each other.</p>"
        f'<ul class="key">{key}</ul>'
        + "".join(f'<div class="{name}">{chart}</div>' for name, chart in drawn)
        + "</section>"
    )


def _differences(comparison: Comparison, all_figures: Sequence[Figures]) -> str:
    one = any((d := of.differences["val_loss"]) is not None and d.low is None for of in all_figures)
    told = "One seed: no interval, and no proof." if one else "Lines: 95 % intervals, paired by seed."
    parts = [
        (
            "Validation loss minus baseline",
            f"At equal tokens; left of zero is better. {told}",
            lambda width: charts.difference_chart(comparison, all_figures, width=width),
        ),
        (
            "Tokens per second over the baseline's",
            "Medians of the ratios by seed; lines: smallest to largest. No fair timing: see the notes.",
            lambda width: charts.speed_chart(comparison, all_figures, width=width),
        ),
    ]
    shown = [
        f'<section><h2>{head}</h2><p class="lead">{lead}</p><div class="wide">{draw(HALF)}</div>'
        f'<div class="narrow">{draw(NARROW[0])}</div></section>'
        for head, lead, draw in parts
        if draw(HALF)
    ]
    return f'<div class="pair">{"".join(shown)}</div>' if shown else ""


def _timelines(comparison: Comparison) -> str:
    figures = [_timeline(comparison, arm) for arm in comparison.arms]
    if not any(figures):
        return ""
    return (
        "<section><h2>Timelines of one MoE unit</h2>"
        '<p class="lead">Recorded spans: what each rank computes and what travels, serial above, overlapped below. '
        "The time axes differ. Select a picture to enlarge it.</p>"
        f'<div class="pictures large">{"".join(figures)}</div></section>'
    )


def _timeline(comparison: Comparison, arm: Arm) -> str:
    run = next((run for run in (*arm.runs, arm.illustration) if run is not None and run.picture), None)
    if run is None or run.picture is None:
        return ""
    try:
        content = read_bytes(run.picture, inside=run.picture.parent, limit=LARGEST_PICTURE)
    except Unreadable:
        return ""
    kind = "image/svg+xml" if run.picture.suffix == ".svg" else "image/png"
    return _figure(comparison, arm, content, kind, _told(arm, run), "Timeline of")


def _told(arm: Arm, run: Run) -> str:
    part = run.part("overlap")
    told = f"{run.name}"
    if part.get("e_hide") is not None:
        told = f"E_hide {number(part['e_hide'], 2)}, at most {number(part.get('bound'), 2)}"
    if run is arm.illustration:
        told += "; a measurement of its own"
        told += f", with {arm.caveat}" if arm.caveat else ""
    return told


def _loads(comparison: Comparison, load_maps: Mapping[str, bytes]) -> str:
    figures = [
        _figure(
            comparison,
            arm,
            load_maps[arm.name],
            "image/png",
            f"seed {arm.runs[0].seed}",
            "Load of the experts of",
        )
        for arm in comparison.arms
        if arm.name in load_maps
    ]
    if not figures:
        return ""
    return (
        "<section><h2>Load of the experts</h2>"
        '<p class="lead">Routes of an expert over the mean of its layer: white is even, red is more, blue is less. One '
        "scale for all pictures.</p>"
        f'<div class="pictures">{"".join(figures)}</div></section>'
    )


def _figure(comparison: Comparison, arm: Arm, content: bytes, kind: str, told: str, what: str) -> str:
    data = base64.b64encode(content).decode()
    return (
        f'<figure><figcaption class="{charts.color_class(comparison, arm)}"><span>{_name(arm)}</span>'
        f"<small>{escape(told)}</small></figcaption>"
        f'<button type="button"><img alt="{what} {escape(arm.name)}" src="data:{kind};base64,{data}"></button></figure>'
    )


def _name(arm: Arm) -> str:
    return escape(charts.short_name(arm) + (" †" if arm.changes_model else ""))


def _left_out(comparison: Comparison) -> str:
    if not comparison.left_out:
        return ""
    items = "".join(
        f"<li><code>{escape(item.name)}</code>: {escape(item.reason)}</li>" for item in comparison.left_out
    )
    return f'<section><h2>Left out</h2><ul class="notes">{items}</ul></section>'
