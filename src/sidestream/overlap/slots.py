"""Where in a shortcut unit the experts are computed: fixed, or found from times measured in the first steps.

With the experts after K of the steps beside the path, a pass takes

    max(steps before K, dispatch) + experts + max(steps from K on, combine)

(arXiv 2404.05019, eq. 11, in the form of a time), and in backward the same with steps twice as long. K* is the one that
makes the sum of both passes smallest: where transfers are longer than all steps together, every K hides as much in
forward, and backward decides.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sidestream.dispatch.base import Received
from sidestream.overlap.recorder import SILENT, Recorder
from sidestream.routing.router import Routed

if TYPE_CHECKING:
    from sidestream.overlap.unit import Unit

log = logging.getLogger(__name__)

T = TypeVar("T")

MEASURED_STEPS = 3


class Clock(Recorder):
    """Seconds of each part of a unit, by name, over the units and passes of the measured steps.

    Parts are still reported to whom the unit reports otherwise.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._inner = SILENT

    @contextmanager
    def listens(self, unit: Unit) -> Iterator[None]:
        """In a pass through a unit."""
        self._inner = before = unit.recorder
        unit.record(self)
        try:
            yield
        finally:
            unit.record(before)

    def part(self, name: str, call: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        return self._timed(name, self._inner.part, name, call, *inputs)

    def stage(self, name: str, call: Callable[[], None]) -> None:
        self._timed(name, self._inner.stage, name, call)

    def router(self, call: Callable[[Tensor], Routed], x: Tensor) -> Routed:
        return self._inner.router(call, x)

    def experts(self, call: Callable[[Received, Any], Tensor], received: Received, late: Any) -> Tensor:
        return self._inner.experts(call, received, late)

    def late_weights(self, call: Callable[[torch.dtype], Any], dtype: torch.dtype, parameter: Tensor) -> Any:
        return self._inner.late_weights(call, dtype, parameter)

    def _timed(self, name: str, call: Callable[..., T], *args: Any) -> T:
        _synchronize()
        begin = time.perf_counter()
        value = call(*args)
        _synchronize()
        self.seconds[name].append(time.perf_counter() - begin)
        return value


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


BACKWARD = 2.0  # of a step, in its forward passes; transfers take as long as in forward


def best_slot(steps: Sequence[float], *, dispatch: float, combine: float) -> int:
    """Number of steps before the experts, of `len(steps)`; the earliest of equally good ones.

    Args:
        steps: Seconds of the steps beside the path, in their order, of a forward pass.
        dispatch, combine: Seconds of the two transfers.
    """

    def exposed(slot: int) -> float:
        before, behind = sum(steps[:slot]), sum(steps[slot:])
        return sum(max(long * before, dispatch) + max(long * behind, combine) for long in (1.0, BACKWARD))

    return min(range(len(steps) + 1), key=exposed)


class SlotSearch:
    """The slot of each kind of unit (by tap).

    Args:
        fixed: The slot, or None to measure.
        enabled: A serial schedule has nothing to gain and is not measured.

    Attributes:
        num_steps: Beside the path of the unit that was begun last.
    """

    num_steps = 0

    def __init__(self, *, fixed: int | None, enabled: bool) -> None:
        self.fixed, self._measures = fixed, fixed is None and enabled
        self.found: dict[str, int] = {}
        self._steps: dict[str, list[str]] = {}
        self._clocks: dict[str, Clock] = defaultdict(Clock)
        self._count = 0

    @property
    def measuring(self) -> bool:
        """Slots are still to be decided."""
        return self._measures

    def begin(self, tap: str, steps: list[str], *, training: bool) -> tuple[int, Clock | None]:
        """The slot for a pass through a unit, and a clock while times are being measured."""
        self._steps[tap], self.num_steps = steps, len(steps)
        slot = self.found.get(tap, len(steps) - 1) if self.fixed is None else min(self.fixed, len(steps))
        measures = self._measures and training and torch.is_grad_enabled()
        return slot, self._clocks[tap] if measures else None

    def end_step(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """After each step on every rank; after the measured ones the slots are decided. Collective once.

        Args:
            group: All ranks.
            device: Where tensors of the group must lie.
        """
        self._count += 1
        if not self._measures or self._count < MEASURED_STEPS:
            return
        self._measures = False
        for tap in sorted(self._steps):
            names = [*self._steps[tap], "dispatch", "combine"]
            # A model without a shared expert has no such part.
            seconds = [statistics.median(self._clocks[tap].seconds[name] or [0.0]) for name in names]
            slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
            dist.broadcast(slowest, src=0, group=group)
            *steps, dispatch, combine = slowest.tolist()
            self.found[tap] = best_slot(steps, dispatch=dispatch, combine=combine)
            if dist.get_rank() == 0:
                times = ", ".join(f"{name} {1e3 * s:.2f} ms" for name, s in zip(names, slowest.tolist()))
                log.info("overlap.slot at %s: %d (%s)", tap, self.found[tap], times)
        self._clocks.clear()
