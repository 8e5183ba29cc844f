"""Tables for pages that `make readme` writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


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
