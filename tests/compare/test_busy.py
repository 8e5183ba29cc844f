"""Speeds of runs that the machine disturbed are marked and not compared; bars and labels are the same numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sidestream.compare import charts
from sidestream.compare.arms import Comparison, compare
from sidestream.compare.figures import Figures, figures
from sidestream.compare.runs import read_folders
from sidestream.compare.table import all_remarks, markdown
from tests.compare.folders import write_run


def found(tmp_path: Path, *runs: tuple[str, int, float, dict[str, Any]]) -> tuple[Comparison, list[Figures]]:
    for place, (overlap, seed, step_ms, result) in enumerate(runs):
        folder = tmp_path / str(place)
        write_run(folder, seed=seed, choices={"overlap": overlap}, step_ms=step_ms, result=result)
    comparison = compare(read_folders([tmp_path])[0])
    return comparison, figures(comparison)


def test_a_busy_machine_is_marked_and_its_speed_not_compared(tmp_path: Path) -> None:
    """Two arms that are the same: the second had half of its cores."""
    busy = {"metrics.waited_share": 0.55}
    comparison, (_, other) = found(tmp_path, ("none", 1, 10.0, {}), ("chunked", 1, 22.2, busy))
    assert other.flat["timing"] == "busy" and other.flat["tokens_per_second_ratio"] is None
    assert other.speed_ratio == (None, None, None) and other.ratio_text == "busy machine"
    assert "‡" in markdown(comparison, [*figures(comparison)])
    told = [
        line for line in all_remarks(comparison, figures(comparison)) if line.startswith("‡ busy machine")
    ]
    assert len(told) == 1 and "overlap=chunked" in told[0]


def test_a_busy_baseline_is_no_baseline_for_speed(tmp_path: Path) -> None:
    _, (_, other) = found(
        tmp_path, ("none", 1, 10.0, {"metrics.waited_share": 0.24}), ("chunked", 1, 9.0, {})
    )
    assert other.flat["timing"] == "busy"


@pytest.mark.parametrize("share", [0.0, 0.14, None])
def test_a_quiet_machine_is_not_marked(tmp_path: Path, share: float | None) -> None:
    known = {"metrics.waited_share": share}
    _, (_, other) = found(tmp_path, ("none", 1, 10.0, known), ("chunked", 1, 5.0, known))
    assert other.flat["timing"] == "" and other.flat["tokens_per_second_ratio"] == pytest.approx(2.0)


def test_seeds_that_disagree_give_no_ratio(tmp_path: Path) -> None:
    """Ratios of 0.2 to 3.6 of arms that compute the same: a range, and no figure."""
    runs = [("none", 1, 10.0, {}), ("none", 2, 36.0, {}), ("none", 3, 10.0, {})]
    runs += [("chunked", 1, 50.0, {}), ("chunked", 2, 10.0, {}), ("chunked", 3, 10.5, {})]
    comparison, all_figures = found(tmp_path, *runs)
    other = all_figures[1]
    assert other.flat["timing"] == "noise" and other.flat["tokens_per_second_ratio"] is None
    assert other.ratio_text == "not told apart (0.20 to 3.60)"
    axes = charts.picture(comparison, all_figures).axes[1]
    assert [bar.get_width() for bar in axes.patches] == [1.0, 0.0]
    assert "not told apart (0.20 to 3.60)" in [text.get_text() for text in axes.texts]


def test_one_seed_whose_steps_overlap_gives_no_ratio(tmp_path: Path) -> None:
    _, (_, other) = found(tmp_path, ("none", 1, 10.0, {}), ("chunked", 1, 9.5, {}))
    assert other.flat["timing"] == "noise" and other.ratio_text == "not told apart"


def test_bars_and_labels_are_the_same_numbers(tmp_path: Path) -> None:
    """Speeds of seeds differ by a factor of three, ratios by little: a bar of the median speed would say otherwise."""
    runs = [("none", s, ms, {}) for s, ms in ((1, 10.0), (2, 30.0), (3, 20.0))]
    runs += [("chunked", s, ms, {}) for s, ms in ((1, 20.0), (2, 62.0), (3, 41.0))]
    comparison, all_figures = found(tmp_path, *runs)
    axes = charts.picture(comparison, all_figures).axes[1]
    (label,) = re.findall("\u00d7 " + r"([\d.]+) \(", " ".join(text.get_text() for text in axes.texts))
    base, other = (bar.get_width() for bar in axes.patches)
    assert other / base == pytest.approx(float(label), abs=0.01)
