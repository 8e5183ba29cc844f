"""`dispatcher=allgather`: every token goes to every rank, which keeps the rows of its own experts.

The same number of rows between every pair of ranks, whatever the routing: the simplest pattern, and the fewest bytes
where nearly every token has an expert on every rank anyway.
"""

from __future__ import annotations

from sidestream.dispatch.packed import PackedDispatcher
from sidestream.dispatch.packing import ToAll


class AllGatherDispatcher(PackedDispatcher):
    """See `PackedDispatcher`.

    Args:
        capacity_factor: None: exact sizes, one host read per layer and forward. A number: static, no host read.
        alignment: Rows per expert are padded to a multiple of this.
        on_overflow: `replay`, `drop` or `error`; the strategy acts on it.
    """

    def __init__(
        self, *, capacity_factor: float | None = None, alignment: int = 1, on_overflow: str = "replay"
    ) -> None:
        super().__init__(
            name="allgather", packing=ToAll(), capacity_factor=capacity_factor, alignment=alignment
        )
        self.on_overflow = on_overflow
