"""`dispatcher=nccl_ep`."""

from __future__ import annotations

from sidestream.dispatch.base import Dispatcher
from sidestream.dispatch.dedup import DedupDispatcher
from sidestream.dispatch.switch import LibrarySwitch


class NcclEPDispatcher(LibrarySwitch):
    """See `LibrarySwitch`."""

    name = "nccl_ep"
    module = "nccl.ep"

    def make_torch(self) -> Dispatcher:
        return DedupDispatcher(
            name=self.name,
            capacity_factor=self.capacity_factor,
            alignment=self.alignment,
            wire_dtype=self.wire_dtype,
            capped=False,
        )
