"""`dispatcher=deep_ep`."""

from __future__ import annotations

from typing import Any

from sidestream.dispatch.dedup import DedupDispatcher
from sidestream.dispatch.switch import LibrarySwitch


class DeepEPDispatcher(LibrarySwitch):
    """See `LibrarySwitch`."""

    name = "deep_ep"
    module = "deep_ep"

    def make_torch(self) -> Any:
        return DedupDispatcher(
            name=self.name,
            capacity_factor=self.capacity_factor,
            alignment=self.alignment,
            wire_dtype=self.wire_dtype,
            capped=True,
        )
