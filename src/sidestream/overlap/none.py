"""`overlap=none`: every transfer is waited for where it starts. The baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from sidestream.overlap.fork import fork

if TYPE_CHECKING:
    from sidestream.model.block import MoEUnit
    from sidestream.model.context import TokenContext


class NoOverlap:
    """Attention, routed experts, shared expert, one after another.

    Args:
        enabled: Present in every schedule; a schedule without overlap is its own serial run.
    """

    name = "none"
    changes_model = False

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled

    def __call__(self, unit: MoEUnit, h: Tensor, context: TokenContext) -> Tensor:
        a = h + unit.attention(h, context)
        tap, current = fork(unit.norm(a), 2)
        path = unit.moe.routed_path(tap, context)
        path.start("dispatch")
        path.finish("dispatch")
        path.run("experts")
        path.start("combine")
        routed = path.finish("combine")
        return a + unit.dropout(unit.moe.shared(current) + routed.view_as(current))
