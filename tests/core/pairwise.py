"""Choose few combinations so that every pair, or triple, of values occurs together at least once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

Row = tuple[Any, ...]


def _together(row: Row, strength: int) -> set[tuple[tuple[int, Any], ...]]:
    return set(combinations(enumerate(row), strength))


def cover(rows: Sequence[Row], strength: int) -> list[Row]:
    """A subset of `rows` (equal length, hashable values) with all that occur together, `strength` at a time. Greedy.

    Impossible combinations are simply left out of `rows`.
    """
    parts = [(row, _together(row, strength)) for row in rows]
    missing = set().union(*(part for _, part in parts))
    chosen: list[Row] = []
    while missing:
        best, covered = max(parts, key=lambda each: len(each[1] & missing))
        missing -= covered
        chosen.append(best)
    return chosen


def pairwise(rows: Sequence[Row]) -> list[Row]:
    return cover(rows, 2)
