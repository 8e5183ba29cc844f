"""The routed path of an MoE layer as stages with a start and a finish. Schedules use nothing else.

A fused path has the same stages, all in one operation: it begins with the first and ends with the last.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from sidestream.dispatch.base import Dispatcher, Pending, Received, Routing
from sidestream.overlap.recorder import SILENT, Recorder


class RoutedExperts(Protocol):
    """The local experts as a path uses them."""

    def __call__(self, received: Received, late: Any = None) -> Tensor:
        """`Received -> [S, H]`."""
        ...

    def late_weights(self, dtype: torch.dtype) -> Any:
        """What to give to the call so that weight gradients are computed later than the rows' gradient."""
        ...


class Path(Protocol):
    """What a schedule does with a path, in this order; between any two of them it may compute."""

    def start(self, stage: str) -> None:
        """Start a transfer stage: `dispatch`, and later `combine`."""
        ...

    def finish(self, stage: str) -> Any:
        """Wait for a started stage and return its result; after `combine` that is the routed output `[T, H]`."""
        ...

    def run(self, stage: str) -> None:
        """Run a compute stage: `experts`."""
        ...


_ORDER = (
    ("start", "dispatch"),
    ("finish", "dispatch"),
    ("run", "experts"),
    ("start", "combine"),
    ("finish", "combine"),
)


class RoutedPath:
    """Dispatch, experts, combine of one routing.

    Args:
        x: `[T, H]`, what the routed experts read.
        routing: Its routing. Rows beyond T are routes of zero tokens that pad experts to their capacity.
        dispatcher: Moves the rows.
        experts: The local experts.
        layer: Index among the MoE layers.
        serial: Every transfer is waited for where it starts, in both passes; `finish` only hands over its result.
        delay_wgrad: In backward the experts' weight gradients are computed while the rows' gradient travels.
        recorder: What the stages report to.
    """

    stages = ("dispatch", "experts", "combine")

    def __init__(
        self,
        x: Tensor,
        routing: Routing,
        *,
        dispatcher: Dispatcher,
        experts: RoutedExperts,
        layer: int = 0,
        serial: bool = False,
        delay_wgrad: bool = False,
        recorder: Recorder = SILENT,
    ) -> None:
        self._dispatcher, self._experts, self._recorder = dispatcher, experts, recorder
        self._serial, self._delay_wgrad, self._late = serial, delay_wgrad, None
        self._plan = dispatcher.plan(routing, layer=layer)
        self._num_tokens, self._num_extra = x.shape[0], routing.expert_ids.shape[0] - x.shape[0]
        self._value: Any = F.pad(x, (0, 0, 0, self._num_extra)) if self._num_extra else x
        self._pending: Pending[Any] | None = None
        self._next = 0

    def start(self, stage: str) -> None:
        """Start a transfer stage."""
        assert stage == self.stages[self._next] and self._pending is None, f"{stage} started out of order"
        self._recorder.stage(stage, partial(self._start, stage))

    def _start(self, stage: str) -> None:
        if self._serial:
            # Made before the rows leave, the weight gradients come after the wait: nothing is hidden.
            self._make_late(stage)
        begin = {"dispatch": self._dispatcher.dispatch, "combine": self._dispatcher.combine}[stage]
        self._pending = begin(self._value, self._plan)
        if self._serial:
            self._wait(stage)

    def _wait(self, stage: str) -> None:
        assert self._pending is not None
        if not self._serial:
            # Backward runs in the opposite order: between the reverse transfer's start and the wait for it.
            self._make_late(stage)
        self._value = self._pending.wait()

    def _make_late(self, stage: str) -> None:
        if stage == "dispatch" and self._delay_wgrad:
            self._late = self._experts.late_weights(self._value.dtype)

    def finish(self, stage: str) -> Any:
        """Wait for a started stage and return its result; after `combine` that is the routed output `[T, H]`."""
        assert stage == self.stages[self._next] and self._pending is not None, (
            f"{stage} finished out of order"
        )
        if not self._serial:
            self._wait(stage)
        self._pending = None
        if stage == "combine" and self._num_extra:
            self._value = self._value[: self._num_tokens]
        self._next += 1
        return self._value

    def run(self, stage: str) -> None:
        """Run a compute stage."""
        assert stage == self.stages[self._next] == "experts", f"{stage} run out of order"
        self._recorder.stage(stage, self._run_experts)
        self._next += 1

    def _run_experts(self) -> None:
        self._value = (
            self._experts(self._value, self._late) if self._delay_wgrad else self._experts(self._value)
        )


class FusedPath:
    """Dispatch, experts, combine of one routing as one operation: `fusion=mega`.

    Args:
        x, routing, serial: See `RoutedPath`.
        begin: Starts the operation on `[T, H]` rows.
    """

    def __init__(
        self, x: Tensor, routing: Routing, *, begin: Callable[[Tensor], Pending[Tensor]], serial: bool = False
    ) -> None:
        self._begin, self._serial = begin, serial
        self._num_tokens, extra = x.shape[0], routing.expert_ids.shape[0] - x.shape[0]
        self._value = F.pad(x, (0, 0, 0, extra)) if extra else x
        self._pending: Pending[Tensor] | None = None
        self._next = 0

    def _step(self, what: str, stage: str) -> None:
        assert (what, stage) == _ORDER[self._next], f"{what} {stage} out of order"
        self._next += 1

    def start(self, stage: str) -> None:
        """Dispatch starts everything."""
        self._step("start", stage)
        if stage == "dispatch":
            self._pending = self._begin(self._value)
            if self._serial:
                self._value = self._pending.wait()

    def run(self, stage: str) -> None:
        """Part of the operation."""
        self._step("run", stage)

    def finish(self, stage: str) -> Any:
        """Combine waits for everything and returns the routed output `[T, H]`."""
        self._step("finish", stage)
        if stage == "dispatch":
            return None
        assert self._pending is not None
        value = self._value if self._serial else self._pending.wait()
        return value[: self._num_tokens]
