"""One table for every report: printed in a terminal, written as Markdown, put into a page. Text of others is text."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from sidestream.tracking.untrusted import printable

LONGEST = 10_000  # characters of a text
MINUS = "\u2212"


class Markdown(str):
    """Text that is Markdown already: of this repository, never of a folder."""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        head: With the unit.
        number: Aligned to the right.
        code: What is typed, such as the name of an option.
        key: In the address of a sorted page.
        meaning: One sentence.
    """

    head: str
    number: bool = False
    code: bool = False
    key: str = ""
    meaning: str = ""


@dataclass(frozen=True)
class Cell:
    """What one place of a table shows.

    Attributes:
        text: `-` where nothing is known.
        value: To sort by; None sorts last.
        detail: Smaller, such as a spread; empty if there is none.
    """

    text: str
    value: float | str | None = None
    detail: str = ""

    @property
    def whole(self) -> str:
        """The text with its detail in brackets."""
        if not self.detail:
            return self.text
        return f"{self.text} {self.detail if self.detail.startswith('(') else f'({self.detail})'}"


@dataclass(frozen=True)
class Row:
    """Cells, one per column.

    Attributes:
        strong: Stands out.
        color: Of the page's colours, `arm-1`; empty for none.
    """

    cells: tuple[Cell, ...]
    strong: bool = False
    color: str = ""


class Table:
    """Columns and rows.

    Args:
        columns: A text stands for a column that is nothing but its head.
        rows: Of cells; a text stands for a cell that is nothing else.
    """

    def __init__(
        self,
        columns: Iterable[Column | str],
        rows: Iterable[Iterable[Cell | str]] = (),
        *,
        title: str = "",
    ) -> None:
        self.columns = [Column(column) if isinstance(column, str) else column for column in columns]
        self.rows: list[Row] = []
        self.title = title
        for row in rows:
            self.add(*row)

    def add(self, *cells: Cell | str, strong: bool = False, color: str = "") -> None:
        """Adds a row."""
        assert len(cells) == len(self.columns), cells
        whole = tuple(cell if isinstance(cell, Cell) else Cell(cell) for cell in cells)
        self.rows.append(Row(whole, strong, color))

    def without(self, *heads: str) -> Table:
        """The same without some of its columns."""
        kept = [n for n, column in enumerate(self.columns) if column.head not in heads]
        found = Table([self.columns[n] for n in kept], title=self.title)
        found.rows = [replace(row, cells=tuple(row.cells[n] for n in kept)) for row in self.rows]
        return found

    def markdown(self) -> str:
        """The table on a page that is written in Markdown."""
        rule = "|".join("---:" if column.number else "---" for column in self.columns)
        lines = [f"| {' | '.join(column.head for column in self.columns)} |", f"|{rule}|"]
        for row in self.rows:
            texts = [
                code(cell.whole).replace("|", r"\|") if column.code else text(cell.whole)
                for column, cell in zip(self.columns, row.cells)
            ]
            lines.append(f"| {' | '.join(texts)} |")
        return "\n".join(lines)

    def show(self, to: Console | None = None) -> None:
        """Prints it, with lines, as wide as it needs."""
        drawn = RichTable(title=Text(printable(self.title)) if self.title else None, title_justify="left")
        self._fill(drawn)
        (to or console()).print(drawn)

    def plain(self) -> str:
        """Its text without lines and colours, as wide as it is."""
        drawn = RichTable(
            box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(c.head for c in self.columns)
        )
        self._fill(drawn)
        buffer = io.StringIO()
        Console(file=buffer, width=LONGEST, color_system=None).print(drawn)
        lines = [line.rstrip() for line in buffer.getvalue().splitlines()]
        return "\n".join([printable(self.title), *(f"  {line}" for line in lines)] if self.title else lines)

    def _fill(self, drawn: RichTable) -> None:
        for column in self.columns:
            drawn.add_column(column.head, justify="right" if column.number else "left", no_wrap=column.number)
        for row in self.rows:
            cells = [Text(printable(cell.whole, limit=LONGEST)) for cell in row.cells]
            drawn.add_row(*cells, style="bold" if row.strong else None)


def numbers(*heads: str) -> list[Column]:
    """Columns that are aligned to the right."""
    return [Column(head, number=True) for head in heads]


def console() -> Console:
    """Of the command: a file or a pipe has no width, and tables need this much."""
    return Console(width=None if sys.stdout.isatty() else 180, markup=False, highlight=False)


def say(line: str, to: Console, *, style: str = "") -> None:
    """Prints a line that may hold text of others."""
    to.print(Text(printable(line, limit=LONGEST), style=style))


def number(value: float | None, digits: int = 0, *, sign: bool = False) -> str:
    """Digits after the point, thousands apart, a true minus sign; `-` for None."""
    return "-" if value is None else f"{value:{'+' if sign else ''},.{digits}f}".replace("-", MINUS)


def short_commit(commit: str | None) -> str:
    """Twelve digits, and `-dirty` where the code had changes that were not committed."""
    name, _, dirty = (commit or "unknown").partition("-")
    return name[:12] + (f"-{dirty}" if dirty else "")


def notes(facts: Iterable[str]) -> str:
    """A list in Markdown, each fact a sentence without its full stop."""
    return "\n".join(f"* {fact}." for fact in facts)


def text(value: object) -> str:
    """What somebody else wrote, as plain text of a page or a table's cell: no HTML, link, picture, code or column."""
    if isinstance(value, Markdown):
        return value
    shown = printable(value, limit=LONGEST).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*\[\]|~])", r"\\\1", shown)


def code(value: object) -> str:
    """The same as code. Marks are longer than any in the text."""
    shown = printable(value, limit=LONGEST)
    mark = "`" * (1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    space = " " if "`" in shown else ""
    return f"{mark}{space}{shown}{space}{mark}"
