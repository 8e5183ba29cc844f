"""Pictures: colours that colour-blind readers tell apart, labels inside the canvas, figures as in the text."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from sidestream.measure import dispatch_report, report
from sidestream.profiling import picture
from sidestream.report import charts

REPOSITORY = Path(__file__).parents[2]
RESULTS = REPOSITORY / "docs" / "results"
# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
SEEN_BY = {
    "everybody": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}  # fmt: skip
XYZ = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]


def lab(color: str, seen: object) -> np.ndarray:
    """CIE Lab (D65) of a hex colour as it is seen."""
    rgb = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = np.array(XYZ) @ np.clip(np.array(seen) @ linear, 0, 1) / [0.95047, 1.0, 1.08883]
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def closest(colors: list[str], seen: object) -> float:
    return min(
        float(np.linalg.norm(lab(a, seen) - lab(b, seen))) for a, b in itertools.combinations(colors, 2)
    )


TOGETHER = {
    "arms": [charts.NEUTRAL, *charts.COLORS, "#FFFFFF"],
    "arms at night": [charts.NEUTRAL_ON_DARK, *charts.ON_DARK],
    "parts": [*dispatch_report.COLORS, "#FFFFFF"],
    "layers": [*report.COLORS.values(), "#FFFFFF"],
    "timeline": [color for color, hatch, _ in picture.LOOKS.values() if not hatch],
    "timeline, hatched": [color for color, hatch, _ in picture.LOOKS.values() if hatch],
}


@pytest.mark.parametrize("seen", SEEN_BY)
@pytest.mark.parametrize("what", TOGETHER)
def test_colours_that_are_drawn_together_are_told_apart(what: str, seen: str) -> None:
    colors = list(dict.fromkeys(TOGETHER[what]))
    assert closest(colors, SEEN_BY[seen]) >= charts.APART


def test_the_simulation_finds_what_colour_blind_people_confuse() -> None:
    before = ["#888888", "#b07aa1", "#f28e2b", "#59a14f", "#4e79a7"]
    assert min(closest(before, seen) for seen in SEEN_BY.values()) < charts.APART
    assert min(closest(["#2ca02c", "#d62728"], seen) for seen in SEEN_BY.values()) < charts.APART


def test_lines_and_areas_differ_in_more_than_colour() -> None:
    assert len({str(charts.look(n)["linestyle"]) for n in range(7)}) == 7
    assert len({charts.look(n)["marker"] for n in range(7)}) == len(charts.HATCHES) == 7


def clipped(figure: Figure) -> list[str]:
    """The visible texts of a figure that do not lie inside its canvas."""
    figure.draw_without_rendering()
    canvas = figure.get_figure().bbox
    outside, not_drawn = [], set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        not_drawn |= {id(tick.label1) for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high}
    for text in figure.findobj(Text):
        if not (text.get_visible() and text.get_text().strip()) or id(text) in not_drawn:
            continue
        if text.axes is not None and not text.axes.get_visible():
            continue
        box = text.get_window_extent()
        if box.x0 < -1 or box.y0 < -1 or box.x1 > canvas.x1 + 1 or box.y1 > canvas.y1 + 1:
            outside.append(text.get_text())
    return outside


@pytest.mark.parametrize("name", ["bench_dispatch", "bench_layer", "bench_fusion_bf16", "overlap_shortcut"])
def test_no_label_is_clipped(name: str) -> None:
    result = json.loads((RESULTS / f"{name}.json").read_text())
    if name == "overlap_shortcut":
        figure = picture.draw(result["picture"])
    else:
        figure = (dispatch_report if name == "bench_dispatch" else report).draw(result)
    assert clipped(figure) == []


def test_a_clipped_label_is_found() -> None:
    figure = charts.new_figure(2, 1)
    figure.text(0.9, 0.5, "a label that does not fit")
    assert clipped(figure) == ["a label that does not fit"]


def test_the_picture_of_the_overlap_gives_the_medians_of_its_file() -> None:
    result = json.loads((RESULTS / "overlap_shortcut.json").read_text())
    median = {arm: result["passes"]["both"]["ms"][arm]["median"] for arm in ("serial", "overlapped")}
    assert result["picture"]["median_ms"] == median
    title = picture.draw(result["picture"]).axes[0].get_title("left")
    assert title.startswith(f"serial  {median['serial']:.1f} ms (median")


def test_every_picture_has_a_description() -> None:
    for page in [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]:
        for text, _ in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text()):
            assert len(text.split()) >= 4, (page, text)
