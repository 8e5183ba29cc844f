"""Places in one block of memory for storages that are not needed all at once."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

ALIGNMENT = 64  # bytes: a cache line, and what vector instructions like


@dataclass(frozen=True)
class Placement:
    """Where everything lies.

    Attributes:
        offsets: Storage -> first byte.
        nbytes: Size of the block.
        live_peak: Most bytes that are needed at the same time; what a perfect plan would take.
    """

    offsets: dict[int, int]
    nbytes: int
    live_peak: int


def plan(spans: Mapping[int, tuple[int, int]], nbytes: Mapping[int, int]) -> Placement:
    """Places such that storages whose spans overlap do not.

    Goes through time once: a storage takes the smallest free gap that holds it, and gives it back after its last use.

    Args:
        spans: Storage -> index of its first and of its last use, both inclusive.
        nbytes: Storage -> size.
    """
    begins, ends = defaultdict(list), defaultdict(list)
    for key, (first, last) in spans.items():
        begins[first].append(key)
        ends[last].append(key)
    free: list[tuple[int, int]] = []  # (offset, size), by offset, never adjacent
    offsets: dict[int, int] = {}
    top = live = live_peak = 0
    for time in sorted(begins.keys() | ends.keys()):
        for key in sorted(begins.get(time, ()), key=lambda k: -nbytes[k]):
            size = _rounded(nbytes[key])
            live += size
            fitting = [(gap, offset, i) for i, (offset, gap) in enumerate(free) if gap >= size]
            if fitting:
                gap, offset, index = min(fitting)
                free[index : index + 1] = [(offset + size, gap - size)] if gap > size else []
            elif free and free[-1][0] + free[-1][1] == top:  # the gap at the end grows
                offset = free.pop()[0]
                top = offset + size
            else:
                offset = top
                top += size
            offsets[key] = offset
        live_peak = max(live_peak, live)
        for key in ends.get(time, ()):
            live -= _rounded(nbytes[key])
            _give_back(free, offsets[key], _rounded(nbytes[key]))
    return Placement(offsets, top, live_peak)


def _rounded(nbytes: int) -> int:
    return max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT


def _give_back(free: list[tuple[int, int]], offset: int, size: int) -> None:
    at = bisect.bisect(free, (offset, 0))
    if at < len(free) and free[at][0] == offset + size:
        size += free.pop(at)[1]
    if at and free[at - 1][0] + free[at - 1][1] == offset:
        offset, before = free.pop(at - 1)
        size += before
        at -= 1
    free.insert(at, (offset, size))
