"""The page: whatever is put into it is escaped, a chart has the page's colours, nothing is fetched."""

from __future__ import annotations

import re

from sidestream.report.charts import COLORS, DAY, NIGHT, chart
from sidestream.report.page import Picture, Section, glued, page
from sidestream.report.table import Cell, Column, Table

EVIL = "<script>alert(1)</script>\x1b[31m\u202e\"'&"


def evil_page() -> str:
    table = Table([Column(EVIL, key="a", meaning=EVIL), Column(EVIL, code=True)])
    table.add(Cell(EVIL, EVIL, EVIL), EVIL, color="arm-1")
    drawn = chart(
        lambda axes: (
            axes.plot([1, 2], color=COLORS[0], label=EVIL) and axes.legend() and axes.set_title(EVIL)
        ),
        alt=EVIL,
        wide=(600, 300),
        narrow=(300, 300),
    )
    picture = Picture(name=EVIL, told=EVIL, alt=EVIL, content=b"<svg/>", kind="image/svg+xml", color="arm-1")
    sections = [
        Section(heading=EVIL, lead=EVIL, table=table, notes=[EVIL], warnings=[EVIL], pictures=[picture]),
        Section(chart=drawn, numbers=table, half=True),
    ]
    return page(title=EVIL, also=EVIL, facts={EVIL: EVIL}, sections=sections)


def test_text_of_others_is_text_in_every_place_of_the_page() -> None:
    shown = evil_page()
    assert shown.count("<script>") == 1 and "\x1b" not in shown and "\u202e" not in shown
    assert shown.count("&lt;script&gt;") > 20
    assert 'alt="&lt;script&gt;' in shown and "{{" not in shown and "{%" not in shown


def test_a_chart_has_the_colours_of_the_page_by_day_and_at_night() -> None:
    shown = evil_page()
    drawn = re.findall(r"<svg.*?</svg>", shown, re.DOTALL)
    assert len(drawn) == 2 and all("stroke: var(--arm-1)" in svg for svg in drawn)
    assert not [color for svg in drawn for color in re.findall(r": (#[0-9a-f]{6})", svg)]
    assert DAY.keys() == NIGHT.keys() and all(f"--{name}: {color};" in shown for name, color in NIGHT.items())


def test_no_part_of_a_chart_is_called_like_one_of_another() -> None:
    ids = re.findall(r' id="([^"]+)"', evil_page())
    assert ids and len(ids) == len(set(ids))


def test_nothing_is_fetched() -> None:
    shown = evil_page()
    assert "default-src 'none'" in shown and not re.search(r"https?://", shown)
    assert not [a for a in re.findall(r'(?:src|href)="([^"]*)"', shown) if not a.startswith(("data:", "#"))]


def test_lines_of_a_narrow_column_end_where_they_may() -> None:
    assert glued("9.50 to 10.5, 2 \u00d7 cpu, EP 2 (a b)").split(" ") == [
        "9.50",
        "to\u00a010.5,",
        "2\u00a0\u00d7\u00a0cpu,",
        "EP\u00a02",
        "(a\u00a0b)",
    ]
