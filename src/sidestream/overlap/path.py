"""The routed path of an MoE layer as stages with a start and a finish. Schedules use nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor

from sidestream.dispatch.base import Dispatcher, Pending, Received, Routing


class Schedule(Protocol):
    """An overlap option: decides the order of work in a unit."""

    name: str
    enabled: bool
    changes_model: bool

    def __call__(self, unit: Any, h: Tensor, context: Any) -> Tensor:
        """Run the unit on the residual stream `h` `[B, S, H]`; `context` is the batch's `TokenContext`."""
        ...


class RoutedPath:
    """Dispatch, experts, combine of one routing.

    Args:
        x: `[T, H]`, what the routed experts read.
        routing: Its routing. Rows beyond T are routes of zero tokens that pad experts to their capacity.
        dispatcher: Moves the rows.
        experts: `Received -> [S, H]`.
        layer: Index among the MoE layers.
    """

    stages = ("dispatch", "experts", "combine")

    def __init__(
        self,
        x: Tensor,
        routing: Routing,
        *,
        dispatcher: Dispatcher,
        experts: Callable[[Received], Tensor],
        layer: int = 0,
    ) -> None:
        self._dispatcher, self._experts = dispatcher, experts
        self._plan = dispatcher.plan(routing, layer=layer)
        self._num_tokens, self._num_extra = x.shape[0], routing.expert_ids.shape[0] - x.shape[0]
        self._value: Any = F.pad(x, (0, 0, 0, self._num_extra)) if self._num_extra else x
        self._pending: Pending[Any] | None = None
        self._next = 0

    def start(self, stage: str) -> None:
        """Start a transfer stage."""
        assert stage == self.stages[self._next] and self._pending is None, f"{stage} started out of order"
        begin = {"dispatch": self._dispatcher.dispatch, "combine": self._dispatcher.combine}[stage]
        self._pending = begin(self._value, self._plan)

    def finish(self, stage: str) -> Any:
        """Wait for a started stage and return its result; after `combine` that is the routed output `[T, H]`."""
        assert stage == self.stages[self._next] and self._pending is not None, (
            f"{stage} finished out of order"
        )
        self._value, self._pending = self._pending.wait(), None
        if stage == "combine" and self._num_extra:
            self._value = self._value[: self._num_tokens]
        self._next += 1
        return self._value

    def run(self, stage: str) -> None:
        """Run a compute stage."""
        assert stage == self.stages[self._next] == "experts", f"{stage} run out of order"
        self._value = self._experts(self._value)
        self._next += 1
