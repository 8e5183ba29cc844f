"""Where what lies in a window: flags, result areas, slots; and how expert-major rows are cut into tiles.

Legend: as in `windows.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sidestream.dispatch.base import DispatchSpec
from sidestream.fusion.mega.window_memory import PAGE

READY, DONE, RELEASED = 0, 1, 2
RING = 4  # steps whose slot and number of tokens can be looked up; two are under way at most
NUM_FLAGS = 3 + 2 * RING
MAX_SLOTS = 1024  # plans that wait for their backward; addresses, not memory


@dataclass(frozen=True)
class Areas:
    """Byte offsets in a window. Everything begins at a multiple of a row and of a page.

    Attributes:
        zero: A row that nobody ever writes.
        rows, grad, row_grads, places: In the result area: rows of the local experts, dy, gradients of the row
            weights, the slot of every rank's every route.
        ids, weights: In a slot, behind x.
    """

    zero: int
    area: int
    area_size: int
    rows: int
    grad: int
    row_grads: int
    places: int
    slot: int
    slot_size: int
    ids: int
    weights: int
    size: int

    @staticmethod
    def of(spec: DispatchSpec, *, num_ranks: int) -> Areas:
        row = spec.hidden_size * spec.dtype.itemsize
        unit = math.lcm(row, PAGE)
        routes = spec.max_tokens * spec.top_k

        def room(size: int) -> int:
            return -(-max(1, size) // unit) * unit

        most = most_rows(spec, num_ranks=num_ranks)
        zero = room((NUM_FLAGS + 2) * 64)
        rows = 0
        grad = rows + room(most * row)
        row_grads = grad + room(spec.max_tokens * row)
        places = row_grads + room(most * 4)
        area_size = places + room(num_ranks * routes * 4)
        ids = room(spec.max_tokens * row)
        weights = ids + room(routes * 4)
        slot_size = weights + room(routes * 4)
        area = zero + unit
        slot = area + 2 * area_size
        size = slot + MAX_SLOTS * slot_size
        return Areas(
            zero, area, area_size, rows, grad, row_grads, places, slot, slot_size, ids, weights, size
        )


def most_rows(spec: DispatchSpec, *, num_ranks: int) -> int:
    """Rows that can come to a rank at worst, padding included."""
    local = spec.num_experts // num_ranks
    return num_ranks * spec.max_tokens * min(spec.top_k, local) + local * (spec.alignment - 1)


def put(ints: Any, offset: int, values: Any) -> None:
    """Write 32-bit integers at a byte offset."""
    ints[offset // 4 : offset // 4 + values.size] = values


def take(ints: Any, offset: int, count: int) -> Any:
    """Read 32-bit integers at a byte offset; a view."""
    return ints[offset // 4 : offset // 4 + count]


def segments(ends: list[int]) -> list[tuple[int, int, int]]:
    """(expert, begin, end) of each."""
    return [(expert, begin, end) for expert, (begin, end) in enumerate(zip([0, *ends], ends))]


def tiles(ends: list[int], rows: int) -> list[tuple[int, int, int]]:
    """The same, cut into pieces of that many rows."""
    return [
        (expert, start, min(start + rows, end))
        for expert, begin, end in segments(ends)
        for start in range(begin, end, rows)
    ]
