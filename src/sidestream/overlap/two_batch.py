"""`overlap=two_batch`: the sequences of a micro-batch in two halves; one computes while the other's rows travel.

The same model as `none`; losses over the batch see both halves together. Weight gradients are sums over halves, so
they are added up in another order. A single sequence is one half, and nothing overlaps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sidestream.overlap.base import Schedule
from sidestream.overlap.fork import fork
from sidestream.overlap.path import Path
from sidestream.routing.router import Routed

if TYPE_CHECKING:
    from sidestream.overlap.unit import Context, Unit


class TwoBatchOverlap(Schedule):
    """See `Schedule`."""

    name = "two_batch"

    def tokens_per_plan(self, num_sequences: int, seq_length: int, *, padding: int = 0) -> int:
        return -(-num_sequences // 2) * seq_length + padding

    def __call__(self, unit: Unit, h: Tensor, context: Context) -> Tensor:
        halves = [part for part in h.tensor_split(2) if len(part)]
        contexts = context.halves(len(h))
        a, current, path, routed = [], [], [], []
        for half, half_context in zip(halves, contexts):  # the second attention hides the first dispatch
            a_half, current_half, path_half, routed_half = self._enter(unit, half, half_context)
            path_half.start("dispatch")
            a.append(a_half)
            current.append(current_half)
            path.append(path_half)
            routed.append(routed_half)
        unit.moe.report(*routed)
        # The first experts hide the second dispatch, the second ones the first combine.
        for half_path in path:
            half_path.finish("dispatch")
            half_path.run("experts")
            half_path.start("combine")
        shared = [unit.moe.shared(x) for x in current]  # hides the second combine
        added = [s + p.finish("combine").view_as(s) for s, p in zip(shared, path)]
        return torch.cat(a) + unit.dropout(torch.cat(added))

    def _enter(self, unit: Unit, h: Tensor, context: Context) -> tuple[Tensor, Tensor, Path, Routed]:
        """Up to the router: residual stream, input of the shared expert, path, decision."""
        a = h + unit.attention(h, context)
        tap, current = fork(unit.norm(a), 2)
        routed = unit.moe.route(tap, context)
        return a, current, self.path(unit, routed), routed
