"""`dispatcher=local`: every expert lives on this rank; nothing travels and the host reads nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from sidestream.dispatch.base import DispatchSpec, Received, Routing
from sidestream.dispatch.counter import Counting
from sidestream.dispatch.layout import (
    RowLayout,
    expert_layout,
    max_slots,
    rows_to_slots,
    sum_routes,
    tokens_to_slots,
)
from sidestream.exchange.link import Link


@dataclass(frozen=True)
class LocalPlan:
    """Expert-major order of the local routes."""

    routing: Routing
    layout: RowLayout

    def rows(self) -> int:
        return self.layout.row_of_slot.numel()


@dataclass(frozen=True)
class _Ready:
    value: object

    def wait(self):  # type: ignore[no-untyped-def]
        return self.value


class LocalDispatcher(Counting):
    """Sorts tokens by expert on one rank. The reference that all dispatchers are compared with."""

    name = "local"

    def wire(self, *, group: dist.ProcessGroup | None, spec: DispatchSpec, link: Link) -> None:
        if group is not None and dist.get_world_size(group) > 1:
            raise ValueError(
                f"dispatcher=local: all experts must be on one rank, but the expert-parallel group has "
                f"{dist.get_world_size(group)} ranks; set strategy.expert_parallel_size=1"
            )
        self._spec = spec

    def plan(self, routing: Routing, *, layer: int = 0) -> LocalPlan:
        assert self._spec is not None, "wire() first"
        spec, ids = self._spec, routing.expert_ids.reshape(-1)
        slots = max_slots(ids.numel(), num_experts=spec.num_experts, alignment=spec.alignment)
        layout = expert_layout(
            ids,
            num_experts=spec.num_experts,
            alignment=spec.alignment,
            num_slots=slots,
            complete=routing.complete,
        )
        return LocalPlan(routing, layout)

    def dispatch(self, x: Tensor, plan: LocalPlan) -> _Ready:
        layout = plan.layout
        rows = tokens_to_slots(x, layout, top_k=plan.routing.top_k)
        weights = rows_to_slots(plan.routing.weights.reshape(-1), layout)
        return _Ready(Received(rows, weights, layout.offsets, exact=layout.every_slot))

    def combine(self, rows: Tensor, plan: LocalPlan) -> _Ready:
        return _Ready(sum_routes(rows, plan.layout, top_k=plan.routing.top_k))
