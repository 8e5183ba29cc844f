"""`overlap=chunked`: the tokens travel in chunks; experts work on one chunk while others are under way.

The same model as `none`: tokens are routed together, and each row is computed as before. Weight gradients are sums
over chunks, so they are added up in another order. The first dispatch and the last combine stay exposed (Tutel,
arXiv 2206.03382, calls it pipelining).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sidestream.overlap.base import Schedule
from sidestream.overlap.fork import fork

if TYPE_CHECKING:
    from sidestream.overlap.unit import Context, Unit


class ChunkedOverlap(Schedule):
    """See `Schedule`.

    Args:
        num_chunks: Chunks of nearly equal numbers of tokens, in their order.
    """

    name = "chunked"

    def __init__(self, *, num_chunks: int = 2, enabled: bool = True, delay_wgrad: bool = False) -> None:
        super().__init__(enabled=enabled, delay_wgrad=delay_wgrad)
        self.num_chunks = num_chunks

    def tokens_per_plan(self, num_sequences: int, seq_length: int, *, padding: int = 0) -> int:
        return -(-(num_sequences * seq_length + padding) // self.num_chunks)

    def __call__(self, unit: Unit, h: Tensor, context: Context) -> Tensor:
        a = h + unit.attention(h, context)
        tap, current = fork(unit.norm(a), 2)
        routed = unit.moe.route(tap, context)
        unit.moe.report(routed)
        paths = [self.path(unit, chunk) for chunk in routed.chunks(self.num_chunks)]
        for path in paths:
            path.start("dispatch")
        for path in paths:
            path.finish("dispatch")
            path.run("experts")
            path.start("combine")
        shared = unit.moe.shared(current)
        rows = torch.cat([path.finish("combine") for path in paths])
        return a + unit.dropout(shared + rows[: routed.x_TH.shape[0]].view_as(current))
