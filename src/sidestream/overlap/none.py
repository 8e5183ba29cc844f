"""`overlap=none`: every transfer is waited for where it starts. The baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from sidestream.overlap.base import Schedule
from sidestream.overlap.fork import fork

if TYPE_CHECKING:
    from sidestream.overlap.unit import Context, Unit


class NoOverlap(Schedule):
    """Attention, routed experts, shared expert, one after another.

    Args:
        enabled: Present in every schedule; a schedule without overlap is its own serial run.
    """

    name = "none"

    def __init__(self, *, enabled: bool = True) -> None:
        super().__init__(enabled=enabled)

    def __call__(self, unit: Unit, h: Tensor, context: Context) -> Tensor:
        a = h + unit.attention(h, context)
        tap, current = fork(unit.norm(a), 2)
        path = unit.moe.routed_path(tap, context)
        path.start("dispatch")
        path.finish("dispatch")
        path.run("experts")
        path.start("combine")
        routed = path.finish("combine")
        return a + unit.dropout(unit.moe.shared(current) + routed.view_as(current))
