"""Markdown: tables and lists, and text of others in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from sidestream.tracking.untrusted import printable


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; a row has a cell per column."""
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        assert len(row) == len(columns), row
        lines.append(f"| {' | '.join(row)} |")
    return lines


def notes(facts: Iterable[str]) -> list[str]:
    """Lines of a list, each fact a sentence without its full stop."""
    return [f"* {fact}." for fact in facts]


def text(value: object) -> str:
    """What somebody else wrote, as plain text of a page or a table's cell: no HTML, link, picture, code or column."""
    shown = printable(value, limit=10_000).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*\[\]|~])", r"\\\1", shown)


def code(value: object) -> str:
    """The same as code. Marks are longer than any in the text."""
    shown = printable(value, limit=10_000)
    mark = "`" * (1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    space = " " if "`" in shown else ""
    return f"{mark}{space}{shown}{space}{mark}"
