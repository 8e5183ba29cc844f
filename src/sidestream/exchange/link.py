"""Links: how long the wire takes. `native` adds nothing; `throttled` emulates a slower, full-duplex link."""

from __future__ import annotations

import time
from typing import Protocol


class Link(Protocol):
    """Decides when a transfer that was issued now may be seen as complete."""

    name: str

    def completion(self, *, sent_bytes: int, received_bytes: int) -> float | None:
        """Return the earliest completion time (`time.monotonic()` seconds), or None for "as soon as it is done".

        Called once, when the transfer is issued, so a late wait costs nothing extra.
        """
        ...


class NativeLink:
    """The machine's own transport, unchanged."""

    name = "native"

    def completion(self, *, sent_bytes: int, received_bytes: int) -> float | None:
        return None


class ThrottledLink:
    """A full-duplex link of a given rate, emulated by sleeping in `wait_` (the CPU stays free meanwhile).

    Transfers of one rank queue: each starts when the link is free, takes
    `latency + max(sent, received) / rate`, and its completion is fixed when it is issued.

    Args:
        gbps: Rate in gigabits per second and direction.
        latency_us: Added to every transfer, in microseconds.
    """

    name = "throttled"

    def __init__(self, *, gbps: float, latency_us: float = 0.0) -> None:
        if gbps <= 0:
            raise ValueError(f"link.gbps={gbps}: expected a rate > 0")
        if latency_us < 0:
            raise ValueError(f"link.latency_us={latency_us}: expected a time >= 0")
        self.bytes_per_second = gbps * 1e9 / 8
        self.latency_s = latency_us * 1e-6
        self._free_at = 0.0

    def completion(self, *, sent_bytes: int, received_bytes: int) -> float | None:
        duration = self.latency_s + max(sent_bytes, received_bytes) / self.bytes_per_second
        self._free_at = max(time.monotonic(), self._free_at) + duration
        return self._free_at
