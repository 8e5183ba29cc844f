"""`dispatcher=alltoall`: the plain baseline. One row travels per (token, route)."""

from __future__ import annotations

from sidestream.dispatch.packed import PackedDispatcher
from sidestream.dispatch.packing import PerRoute


class AllToAllDispatcher(PackedDispatcher):
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
            name="alltoall", packing=PerRoute(), capacity_factor=capacity_factor, alignment=alignment
        )
        self.on_overflow = on_overflow
