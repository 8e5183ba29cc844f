"""Choose few combinations so that every pair of values occurs together at least once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

Row = tuple[Any, ...]


def _pairs(row: Row) -> set[tuple[int, Any, int, Any]]:
    return {(i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2)}


def pairwise(rows: Sequence[Row]) -> list[Row]:
    """A subset of `rows` (equal length, hashable values) that covers every pair of values found in them. Greedy.

    Impossible combinations are simply left out of `rows`.
    """
    missing = set().union(*map(_pairs, rows))
    chosen: list[Row] = []
    while missing:
        best = max(rows, key=lambda row: len(_pairs(row) & missing))
        missing -= _pairs(best)
        chosen.append(best)
    return chosen
