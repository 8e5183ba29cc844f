"""Counters of a static dispatcher, on the device: nothing here makes the host wait."""

from __future__ import annotations

import torch
from torch import Tensor


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
