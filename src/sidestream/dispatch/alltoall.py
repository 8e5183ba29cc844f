"""`dispatcher=alltoall`: the plain baseline. One row travels per (token, route), sizes are exact (eager).

    plan      counts per expert go to every rank; one host read of what will be sent and received
    dispatch  local routes in expert order -> rows and weights travel -> expert-major order on the receiver
    combine   the same way back; K-way sum in fp32 on the sender

Legend: T tokens, K routes, H features, E experts, P ranks, L = E / P local experts, N rows sent, R received, S slots.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from sidestream.dispatch.base import DispatchSpec, Received, Routing
from sidestream.dispatch.layout import (
    Layout,
    expert_layout,
    rows_to_slots,
    slots_to_rows,
    sum_routes,
    tokens_to_slots,
)
from sidestream.exchange.link import Link
from sidestream.exchange.ops import Channel, new_ticket, start_, wait_
from sidestream.exchange.transfer import Transfer


class AllToAllPlan:
    """Metadata of one routing; the counts are on their way when it is made."""

    def __init__(self, dispatcher: AllToAllDispatcher, routing: Routing) -> None:
        assert dispatcher.spec is not None and dispatcher.channel is not None, "wire() first"
        self.spec, self.channel, self.routing = dispatcher.spec, dispatcher.channel, routing
        ids = routing.expert_ids.reshape(-1)
        self.route = expert_layout(
            ids,
            num_experts=self.spec.num_experts,
            alignment=1,
            num_slots=ids.numel(),
            complete=routing.complete,
        )
        self._sizes: _Sizes | None = None
        self._sent_PL = self.route.counts.view(self.channel.size, -1)
        self._received_PL = torch.empty_like(self._sent_PL)
        self._ticket = new_ticket()
        ones = torch.ones(self.channel.size, dtype=torch.int64)
        start_(self._received_PL, self._sent_PL, ones, ones, self.channel.id, self._ticket, "dispatch.counts")

    def sizes(self) -> _Sizes:
        """Wait for the counts and read them: the one host read of this dispatcher."""
        if self._sizes is None:
            wait_(self._received_PL, self.channel.id, self._ticket)
            sent_PL, received_PL = torch.stack([self._sent_PL, self._received_PL]).tolist()
            self._sizes = _Sizes.of(sent_PL, received_PL, alignment=self.spec.alignment)
        return self._sizes

    def rows(self) -> int:
        return self.sizes().num_slots

    @cached_property
    def sent(self) -> Layout:
        """Routes in the order in which their rows leave."""
        return self.route.trim(self.sizes().num_sent)

    @cached_property
    def received_layout(self) -> Layout:
        """Expert-major order of the received rows, which arrive by source rank and by expert within it."""
        sizes = self.sizes()
        num_ranks, num_local = self._received_PL.shape
        expert_of_chunk = torch.arange(num_local, device=self._received_PL.device).repeat(num_ranks)
        expert_of_row = expert_of_chunk.repeat_interleave(
            self._received_PL.reshape(-1), output_size=sizes.num_received
        )
        return expert_layout(
            expert_of_row,
            num_experts=num_local,
            alignment=self.spec.alignment,
            num_slots=sizes.num_slots,
            complete=True,
        )


@dataclass(frozen=True)
class _Sizes:
    """Host-side sizes. `send` and `recv` are `[P]` int64 rows per rank."""

    send: Tensor
    recv: Tensor
    num_sent: int
    num_received: int
    num_slots: int
    host_offsets: list[int]

    @staticmethod
    def of(sent_PL: list[list[int]], received_PL: list[list[int]], *, alignment: int) -> _Sizes:
        send, recv = [sum(row) for row in sent_PL], [sum(row) for row in received_PL]
        padded = [-(-sum(column) // alignment) * alignment for column in zip(*received_PL)]
        ends = list(itertools.accumulate(padded))
        return _Sizes(torch.tensor(send), torch.tensor(recv), sum(send), sum(recv), ends[-1], ends)


@dataclass
class _PendingReceived:
    plan: AllToAllPlan
    rows: tuple[Transfer, Tensor]
    weights: tuple[Transfer, Tensor]
    layout: Layout

    def wait(self) -> Received:
        weights_R = self.weights[0].finish(self.weights[1])
        rows_RH = self.rows[0].finish(self.rows[1])
        return Received(
            rows_to_slots(rows_RH, self.layout),
            rows_to_slots(weights_R, self.layout),
            self.layout.offsets,
            self.plan.sizes().host_offsets,
            exact=True,
        )


@dataclass
class _PendingCombined:
    plan: AllToAllPlan
    transfer: Transfer
    token: Tensor

    def wait(self) -> Tensor:
        plan = self.plan
        rows_NH = self.transfer.finish(self.token)
        return sum_routes(rows_NH, plan.sent, top_k=plan.routing.top_k)


class AllToAllDispatcher:
    """Plain all-to-all, eager: exact sizes, one host read per layer and forward, none in backward."""

    name = "alltoall"

    def __init__(self) -> None:
        self.spec: DispatchSpec | None = None
        self.channel: Channel | None = None

    def wire(self, *, group: dist.ProcessGroup | None, spec: DispatchSpec, link: Link) -> None:
        self.spec, self.channel = spec, Channel(group, link)
        if spec.num_experts % self.channel.size:
            raise ValueError(
                f"model.num_experts={spec.num_experts}: expected a multiple of the expert-parallel size "
                f"{self.channel.size}"
            )

    def plan(self, routing: Routing) -> AllToAllPlan:
        return AllToAllPlan(self, routing)

    def dispatch(self, x: Tensor, plan: AllToAllPlan) -> _PendingReceived:
        sizes = plan.sizes()
        weights_N = rows_to_slots(plan.routing.weights.reshape(-1), plan.sent)
        rows_NH = tokens_to_slots(x, plan.sent, top_k=plan.routing.top_k)
        weights = Transfer(plan.channel, sizes.send, sizes.recv, "dispatch.weights")
        rows = Transfer(plan.channel, sizes.send, sizes.recv, "dispatch")
        weights_token = weights.start(weights_N, num_received=sizes.num_received)
        rows_token = rows.start(rows_NH, num_received=sizes.num_received)
        # The layout is computed while the rows travel.
        return _PendingReceived(plan, (rows, rows_token), (weights, weights_token), plan.received_layout)

    def combine(self, rows: Tensor, plan: AllToAllPlan) -> _PendingCombined:
        sizes = plan.sizes()
        rows_RH = slots_to_rows(rows, plan.received_layout)
        transfer = Transfer(plan.channel, sizes.recv, sizes.send, "combine")
        return _PendingCombined(plan, transfer, transfer.start(rows_RH, num_received=sizes.num_sent))

    def needed(self) -> Tensor | None:
        return None

    def resize(self, budget: int) -> None:
        raise ValueError(f"dispatcher=alltoall: budget {budget} asked for, but its sizes are exact (eager)")

    def bytes_sent(self) -> int:
        return 0 if self.channel is None else self.channel.bytes_sent

    def metadata_bytes_sent(self) -> int:
        return 0 if self.channel is None else self.channel.metadata_bytes_sent

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()
        self.spec = self.channel = None
