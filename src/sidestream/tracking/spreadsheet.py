"""CSV that a spreadsheet shows and never calculates."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from sidestream.tracking.untrusted import printable

_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet calculates what starts with one of these


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """A head and a line per row, at least one; all rows have the columns of the first."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([cell(name) for name in rows[0]])
    writer.writerows([cell(row[name]) for name in rows[0]] for row in rows)
    return out.getvalue()


def cell(value: Any) -> Any:
    """Numbers as they are, also those that are text; text that would be a formula behind an apostrophe."""
    if not isinstance(value, str):
        return value
    text = printable(value, limit=32_000)
    if value.lstrip(" \u00a0").startswith(_FORMULA) and not _is_number(value):
        return f"'{text}"
    return text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text == text.strip()
