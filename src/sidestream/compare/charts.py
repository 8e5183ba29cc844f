"""Charts of the page as SVG text: colours and fonts come from the page's style, so they follow its colour scheme.

Arm number n is drawn in the colour of the class `arm-n`; the baseline is `arm-0`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from sidestream.compare.arms import Arm, Comparison
from sidestream.compare.figures import Curve, Figures
from sidestream.compare.table import number, ratio_text

COLORS = 8  # classes arm-0 to arm-7; further arms take them again
LINE = 1.5 * 13  # px, of a row's label
ROW = LINE + 26


def color_class(comparison: Comparison, arm: Arm) -> str:
    """The same colour in every chart and in the table; the baseline's is always the neutral one."""
    others = [other.name for other in comparison.arms if other is not comparison.baseline]
    return "arm-0" if arm is comparison.baseline else f"arm-{1 + others.index(arm.name) % (COLORS - 1)}"


def short_name(arm: Arm) -> str:
    """Options without their groups, where there is no dot that could be lost: `nccl_ep, shortcut`."""
    values = [(key, value) for key, value in arm.values.items() if value != "absent"]
    return ", ".join(f"{key}={value}" if "." in key else value for key, value in values)


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers from `low` to `high`."""
    if not high > low:
        return [low]
    raw = (high - low) / max(1, count)
    scale = 10 ** math.floor(math.log10(raw))
    step = next(scale * factor for factor in (1, 2, 5, 10) if scale * factor >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(place * step, 12) for place in range(first, last + 1)]


def short_number(value: float) -> str:
    """`12k`, `1.5M`; small numbers in full."""
    for scale, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return number(round(value / scale, 2), 0 if value % scale == 0 else 1) + suffix
    return f"{value:g}".replace("-", "\u2212")


def loss_chart(comparison: Comparison, all_figures: Sequence[Figures], *, width: int, height: int) -> str:
    """Validation loss over tokens: a line per arm, a band from the lowest to the highest seed; training loss thin.

    Args:
        width, height: px; a page has a chart for wide and one for narrow windows, as text must not shrink.
    """
    curves = [(of, of.curves["val_loss"], of.curves["train_loss"]) for of in all_figures]
    drawn = [c for _, val, _ in curves for c in [val] if c.tokens] or [t for _, _, t in curves if t.tokens]
    if not drawn:
        return ""
    left, right, top, bottom = 46, 14, 10, 38
    last = max(c.tokens[-1] for c in drawn)
    low, high = min(min(c.low) for c in drawn), max(max(c.high) for c in drawn)
    margin = 0.06 * (high - low) or 0.1
    low, high = low - margin, high + margin

    def x(tokens: float) -> float:
        return left + (width - left - right) * tokens / last

    def y(loss: float) -> float:
        return top + (height - top - bottom) * (high - loss) / (high - low)

    clip = f"clip-{width}"
    parts = [
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="Loss over training tokens">',
        f'<clipPath id="{clip}"><rect x="{left}" y="{top}" width="{width - left - right + 4}" '
        f'height="{height - top - bottom}"/></clipPath>',
    ]
    loss_ticks = ticks(low, high, 5)
    digits = (
        max(1, -math.floor(math.log10(loss_ticks[1] - loss_ticks[0]) + 1e-9)) if len(loss_ticks) > 1 else 2
    )
    for value in loss_ticks:
        parts.append(
            f'<line class="grid" x1="{left}" x2="{width - right}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        )
        parts.append(
            f'<text class="tick end" x="{left - 7}" y="{y(value) + 4:.1f}">{value:.{digits}f}</text>'
        )
    for value in ticks(0, last, width // 110):
        parts.append(
            f'<text class="tick middle" x="{min(x(value), width - right - 8):.1f}" y="{height - bottom + 17}">'
            f"{short_number(value)}</text>"
        )
    parts.append(
        f'<text class="tick middle" x="{(left + width - right) / 2:.1f}" y="{height - 5}">training tokens</text>'
    )
    parts.append(f'<g clip-path="url(#{clip})">')
    for of, val, train in curves:
        kind = color_class(comparison, of.arm)
        if train.tokens:
            parts.append(f'<polyline class="train {kind}" points="{_points(train, train.mean, x, y)}"/>')
        if val.tokens:
            band = [*zip(val.tokens, val.high), *reversed([*zip(val.tokens, val.low)])]
            around = " ".join(f"{x(tokens):.1f},{y(loss):.1f}" for tokens, loss in band)
            parts.append(f'<polygon class="band {kind}" points="{around}"/>')
    # The baseline, dashed, over the others: an arm with the same loss stays visible below it.
    for of, val, _ in sorted(curves, key=lambda drawn: drawn[0].arm is comparison.baseline):
        kind = color_class(comparison, of.arm)
        parts.append(f'<polyline class="line {kind}" points="{_points(val, val.mean, x, y)}"/>')
        for tokens, loss in zip(val.tokens, val.mean):
            tip = f"{of.arm.name}: {loss:.4f} at {tokens:,} tokens"
            parts.append(
                f'<circle class="dot {kind}" cx="{x(tokens):.1f}" cy="{y(loss):.1f}" r="3">'
                f"<title>{escape(tip)}</title></circle>"
            )
    return "".join([*parts, "</g></svg>"])


def _points(curve: Curve, values, x, y) -> str:
    return " ".join(f"{x(tokens):.1f},{y(value):.1f}" for tokens, value in zip(curve.tokens, values))


def speed_chart(comparison: Comparison, all_figures: Sequence[Figures], *, width: int) -> str:
    """A bar per arm, its speed over the baseline's; a line from the smallest to the largest ratio of the seeds.

    Bar, line and label are the same numbers. Without a ratio there is no bar, and the label says why.
    """
    rows = [(of, *speed_ratio(of)) for of in all_figures]
    if not any(of.flat["tokens_per_second"] for of in all_figures):
        return ""
    largest = max([1.0, *(high for _, _, _, high in rows if high is not None)])
    parts = [_open(width, len(rows), "Tokens per second over the baseline's")]
    room = max(60, width - 230)
    for place, (of, ratio, low, high) in enumerate(rows):
        kind, top = color_class(comparison, of.arm), place * ROW
        end = 0.0
        parts.append(_label(of, top))
        if ratio is not None:
            end = room * ratio / largest
            parts.append(
                f'<rect class="bar {kind}" x="0" y="{top + LINE:.1f}" width="{end:.1f}" height="14" rx="2"/>'
            )
        if low is not None and high is not None:
            ends = (room * low / largest, room * high / largest)
            end = max(end, ends[1])
            parts.append(
                f'<line class="spread" x1="{ends[0]:.1f}" x2="{ends[1]:.1f}" y1="{top + LINE + 7}" '
                f'y2="{top + LINE + 7}"/>'
            )
        parts.append(
            f'<text class="value" x="{end + 7:.1f}" y="{top + LINE + 11:.1f}">{escape(speed_label(of))}</text>'
        )
    return "".join([*parts, "</svg>"])


def speed_ratio(of: Figures) -> tuple[float | None, float | None, float | None]:
    """What is drawn of an arm's speed over the baseline's: bar, and both ends of the line; None where nothing is."""
    if of.flat["baseline"]:
        return (1.0, None, None) if of.flat["tokens_per_second"] else (None, None, None)
    if of.flat["timing"] == "busy":
        return None, None, None
    low, high = (of.flat[f"tokens_per_second_ratio_{end}"] for end in ("min", "max"))
    return of.flat["tokens_per_second_ratio"], low, high


def speed_label(of: Figures) -> str:
    """`\u00d7 0.95 (0.90 to 1.01)`, or why there is no ratio; the baseline's tokens per second."""
    if of.flat["baseline"]:
        return f"{number(of.flat['tokens_per_second'])} tokens/s"
    return ratio_text(of) or "-"


def difference_chart(
    comparison: Comparison, all_figures: Sequence[Figures], *, width: int, loss: str = "val_loss"
) -> str:
    """A point and an interval per arm beside a line at zero: loss minus that of the baseline."""
    rows = [(of, of.differences[loss]) for of in all_figures if of.differences[loss] is not None]
    ends = [end for _, d in rows if d is not None for end in (d.mean, d.low, d.high) if end is not None]
    if not rows:
        return ""
    reach = 1.15 * max(max(map(abs, ends)), 1e-4)

    def x(value: float) -> float:
        return width / 2 + (width / 2 - 6) * value / reach

    height = len(rows) * ROW
    parts = [_open(width, len(rows), "Difference of the loss to the baseline", below=24)]
    for value in ticks(-reach, reach, 4):
        zero = " zero" if value == 0 else ""
        parts.append(
            f'<line class="grid{zero}" x1="{x(value):.1f}" x2="{x(value):.1f}" y1="0" y2="{height}"/>'
        )
        text = "0" if value == 0 else f"{value:+g}".replace("-", "\u2212")
        parts.append(f'<text class="tick middle" x="{x(value):.1f}" y="{height + 16}">{text}</text>')
    for place, (of, d) in enumerate(rows):
        assert d is not None
        kind, top = color_class(comparison, of.arm), place * ROW
        middle = top + LINE + 8
        parts.append(_label(of, top))
        if d.low is not None and d.high is not None:
            parts.append(
                f'<line class="interval {kind}" x1="{x(d.low):.1f}" x2="{x(d.high):.1f}" '
                f'y1="{middle:.1f}" y2="{middle:.1f}"/>'
            )
        parts.append(f'<circle class="dot {kind}" cx="{x(d.mean):.1f}" cy="{middle:.1f}" r="5"/>')
    return "".join([*parts, "</svg>"])


def _open(width: int, rows: int, label: str, *, below: int = 0) -> str:
    height = rows * ROW + below
    return f'<svg class="chart" viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{label}">'


def _label(of: Figures, top: float) -> str:
    mark = " †" if of.arm.changes_model else ""
    return f'<text class="label" x="0" y="{top + 13:.1f}">{escape(short_name(of.arm) + mark)}</text>'
