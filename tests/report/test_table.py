"""One table in three forms: lines for a terminal, Markdown, plain text; text of others is text in each."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from sidestream.report.table import Cell, Column, Markdown, Table, code, number, short_commit, text

EVIL = "x|y`z`<img src=x>[red]a[/red](http://b)\x1b[31m\u202e"


def two() -> Table:
    table = Table([Column("arm", code=True), Column("ms", number=True), "note"])
    table.add("alltoall", Cell("1.50", 1.5, "1.4 to 1.6"), EVIL, strong=True)
    return table


def test_markdown_has_as_many_cells_in_each_line_and_no_markup_of_others() -> None:
    head, rule, row = two().markdown().splitlines()
    assert (head, rule) == ("| arm | ms | note |", "|---|---:|---|")
    assert row.startswith("| `alltoall` | 1.50 (1.4 to 1.6) | x\\|y\\`z\\`&lt;img src=x&gt;\\[red\\]a")
    assert row.replace("\\|", "").count("|") == 4 and row.isprintable()
    assert Table([Column("a", code=True)], [["b|c"]]).markdown().endswith("| `b\\|c` |")


def test_what_is_markdown_already_stays_so() -> None:
    assert Table(["a", "b"], [["**x**", Markdown("**x**")]]).markdown().endswith("| \\*\\*x\\*\\* | **x** |")


@pytest.mark.parametrize("plain", [False, True])
def test_a_terminal_shows_text_of_others_and_never_obeys_it(plain: bool) -> None:
    out = io.StringIO()
    if plain:
        out.write(two().plain())
    else:
        two().show(Console(file=out, width=200, force_terminal=True, color_system=None))
    shown = out.getvalue()
    assert "1.50 (1.4 to 1.6)" in shown and "[red]a[/red]" in shown and "\\x1b[31m\\u202e" in shown
    assert "\u202e" not in shown and "\x1b[31m" not in shown


def test_plain_text_is_as_wide_as_it_is_and_has_its_columns_below_each_other() -> None:
    table = Table(["part", Column("ms", number=True)], [["dispatch", "1.25"], ["x" * 300, "10.50"]])
    head, first, second = table.plain().splitlines()
    assert second == "x" * 300 + "  10.50" and first.endswith("  1.25") and head.endswith("ms")
    assert len({len(line) for line in (head, first, second)}) == 1


def test_a_row_with_another_number_of_cells_is_a_fault() -> None:
    with pytest.raises(AssertionError):
        Table(["a", "b"], [["1"]])


def test_numbers_and_commits() -> None:
    assert (number(-1234.5, 1), number(0.25, 2, sign=True), number(None)) == ("\u22121,234.5", "+0.25", "-")
    assert short_commit("0123456789abcdef-dirty") == "0123456789ab-dirty" and short_commit(None) == "unknown"


@pytest.mark.parametrize(
    ("given", "shown"),
    [("two_batch", "two_batch"), ("a|b", "a\\|b"), ("<b>&", "&lt;b&gt;&amp;"), ("![x](y)", "!\\[x\\](y)")],
)
def test_markdown_text(given: str, shown: str) -> None:
    assert text(given) == shown
    assert code("a``b") == "``` a``b ```" and code("a\nb") == "`a\\nb`"
