"""`overlap=shared_expert`: the shared expert is computed while rows travel. The same model as `none`.

First half (up to the activation) under dispatch, second half under combine, as in Megatron-Core
(`--moe-shared-expert-overlap`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from sidestream.overlap.base import Schedule
from sidestream.overlap.fork import fork

if TYPE_CHECKING:
    from sidestream.overlap.unit import Context, Unit


class SharedExpertOverlap(Schedule):
    """See `Schedule`. Hides at most the shared expert: little, where it is as narrow as one routed expert."""

    name = "shared_expert"

    def __call__(self, unit: Unit, h: Tensor, context: Context) -> Tensor:
        a = h + unit.attention(h, context)
        tap, current = fork(unit.norm(a), 2)
        routed = unit.moe.route(tap, context)
        unit.moe.report(routed)
        path = self.path(unit, routed)
        path.start("dispatch")
        inner = unit.moe.shared_up(current)
        path.finish("dispatch")
        path.run("experts")
        path.start("combine")
        shared = unit.moe.shared_down(inner, current)
        return a + unit.dropout(shared + path.finish("combine").view_as(current))
