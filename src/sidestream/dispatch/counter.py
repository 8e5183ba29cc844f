"""What dispatchers share: counters on the device, which never make the host wait, the budget, the bytes, the end."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sidestream.dispatch.base import DispatchSpec
from sidestream.exchange.ops import Channel


class RowCounter:
    """Per MoE layer, since the last reset: most rows a plan needed, and routes that found no room.

    Args:
        num_layers: MoE layers.
        device: Where the counters live.
    """

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self.needed = torch.zeros(num_layers, dtype=torch.int64, device=device)
        self.dropped = torch.zeros(num_layers, dtype=torch.int64, device=device)

    def note(self, layer: int, *, needed: Tensor, dropped: Tensor) -> None:
        """Take in one plan: int64 scalars or `[1]` on the device."""
        self.needed[layer] = torch.maximum(self.needed[layer], needed.squeeze())
        self.dropped[layer] += dropped.squeeze()

    def reset(self) -> None:
        self.needed.zero_()
        self.dropped.zero_()


class Counting:
    """Base of the dispatchers. `wire` sets the channel and, with a budget, the counter.

    Attributes:
        name, transport, budget: See `Dispatcher`.
        align: Rows per expert are padded to a multiple of this.
        counter: Of a static dispatcher, once wired.
    """

    name: str = "?"
    transport: str | None = None
    budget: int | None = None
    align: int = 1
    counter: RowCounter | None = None
    _spec: DispatchSpec | None = None
    _channel: Channel | None = None

    @property
    def channel(self) -> Channel | None:
        """Where rows travel, with hooks that see every transfer; None before `wire`."""
        return self._channel

    def needed(self) -> Tensor | None:
        return None if self.counter is None else self.counter.needed

    def dropped(self) -> Tensor | None:
        return None if self.counter is None else self.counter.dropped

    def reset_needed(self) -> None:
        if self.counter is not None:
            self.counter.reset()

    def resize(self, budget: int) -> None:
        if self.budget is None:
            raise ValueError(
                f"dispatcher={self.name}: budget {budget} asked for, but its sizes are exact (eager)"
            )
        unit = math.lcm(self.align, 64)
        self.budget = max(self.budget, -(-budget // unit) * unit)

    def bytes_sent(self) -> int:
        return 0 if self._channel is None else self._channel.bytes_sent

    def metadata_bytes_sent(self) -> int:
        return 0 if self._channel is None else self._channel.metadata_bytes_sent

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._spec = self._channel = self.counter = None
