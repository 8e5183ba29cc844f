"""The dispatchers on torch.distributed: one walk, whatever a row that travels stands for (`packing.py`).

    plan      rows for each rank are counted; the counts travel
    dispatch  rows, sorted by destination rank, and their routes travel
              rows that arrived -> expert-major order, padded
    combine   the rows of each received row's experts are summed, and the sums travel back
              the sums of each token are added up

Eager: exact sizes; the host reads the counts once per plan. Static: buffers of fixed size, nothing is read. On a CPU
the exchange takes its sizes from the counts itself, so the wire carries exactly the rows there are; on a GPU, where
torch.distributed wants them on the host, every pair of ranks exchanges the most rows there can be.

Legend: T tokens, K routes per token, H features, E experts, R ranks, L = E / R local experts, C columns per token and
J routes per row (see `packing.py`), N rows that travel, S expert-major slots.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from sidestream.dispatch.base import DispatchSpec, Received, Routing, receive_budget
from sidestream.dispatch.cap import cap_routing, needed_rows
from sidestream.dispatch.counter import Counting, RowCounter
from sidestream.dispatch.layout import (
    RowLayout,
    expert_layout,
    rows_to_slots,
    sum_routes,
    tokens_to_slots,
)
from sidestream.dispatch.packing import Packing
from sidestream.exchange.codec import MXFP8, WithIds
from sidestream.exchange.link import Link
from sidestream.exchange.ops import Channel, new_ticket, start_, wait_
from sidestream.exchange.transfer import Transfer


@dataclass(frozen=True)
class _Sizes:
    """How many rows a plan moves.

    Attributes:
        send, recv: `[R]` int64 on the host: rows for and from each rank.
        num_sent, num_received: Rows of the buffers, at least the sums.
        num_slots: S.
        num_routes: Routes that arrive; None if the host does not know.
        host_offsets: Inclusive ends of the experts' segments; None if the host does not know.
    """

    send: Tensor
    recv: Tensor
    num_sent: int
    num_received: int
    num_slots: int
    num_routes: int | None = None
    host_offsets: list[int] | None = None


class Histogram:
    """Routes per expert of every rank, on their way when it is made."""

    def __init__(self, expert_ids: Tensor, spec: DispatchSpec, channel: Channel) -> None:
        self._counts_RE = route_counts(expert_ids, spec.num_experts).repeat(channel.size, 1)
        self._out_RE, self._channel = torch.empty_like(self._counts_RE), channel
        self._ticket, ones = new_ticket(), torch.ones(channel.size, dtype=torch.int64)
        tag = "dispatch.histogram"
        start_(self._out_RE, self._counts_RE, ones, ones, channel.id, self._ticket, tag)

    def wait(self) -> Tensor:
        """`[R, E]` int64. Call once."""
        wait_(self._out_RE, self._channel.id, self._ticket)
        return self._out_RE


def route_counts(expert_ids: Tensor, num_experts: int) -> Tensor:
    """`[T, K]` ids -> `[E]` int64 routes per expert; -1 is no route."""
    key = torch.where(expert_ids < 0, num_experts, expert_ids).reshape(-1)
    return key.new_zeros(num_experts + 1).scatter_add_(0, key, torch.ones_like(key))[:num_experts]


class PackedPlan:
    """Metadata of one routing; the counts are on their way when it is made."""

    def __init__(self, dispatcher: PackedDispatcher, routing: Routing, layer: int) -> None:
        self.dispatcher, self.routing, self.layer = dispatcher, routing, layer
        self.channel, self.spec = dispatcher.wired
        num_tokens, top_k = routing.expert_ids.shape
        if dispatcher.fixed and num_tokens > self.spec.max_tokens:
            fix = "dispatcher=alltoall" if dispatcher.budget is None else "dispatcher.capacity_factor=null"
            raise ValueError(
                f"dispatcher={dispatcher.name}: {num_tokens} tokens, but buffers are sized for "
                f"{self.spec.max_tokens}; set {fix}"
            )
        self.num_local = self.spec.num_experts // self.channel.size
        self.columns = dispatcher.packing.columns(top_k, self.channel.size)
        self.routes_per_row = 1 if dispatcher.packing.per_route and self.channel.size > 1 else top_k
        self.unpack: RowLayout | None = None
        capped = dispatcher.capped and self.channel.size > 1
        self._histogram = Histogram(routing.expert_ids, self.spec, self.channel) if capped else None
        if self.channel.size > 1 and not capped:
            self._count()

    @cached_property
    def expert_ids(self) -> Tensor:
        """`[T, K]`, without the routes that a capped dispatcher leaves out."""
        ids, d = self.routing.expert_ids, self.dispatcher
        if self._histogram is None:
            return ids
        assert d.budget is not None and d.counter is not None
        histogram_RE, rank = self._histogram.wait(), self.channel.rank
        sizes = {"num_local": self.num_local, "alignment": d.align}
        kept = cap_routing(ids, histogram_RE, rank=rank, budget=d.budget, **sizes)
        needed = needed_rows(histogram_RE, rank=rank, **sizes)
        d.counter.note(self.layer, needed=needed, dropped=(ids >= 0).sum() - (kept >= 0).sum())
        return kept

    def _count(self) -> None:
        """Count rows per rank, and routes per expert where the host will size buffers by them; send the counts."""
        d, num_ranks = self.dispatcher, self.channel.size
        ids = self.expert_ids
        ranks = d.packing.destinations(ids, self.num_local, num_ranks)
        self._full_pack = expert_layout(
            ranks.reshape(-1),
            num_experts=num_ranks,
            num_slots=num_ranks * d.rows_per_pair if d.even else ranks.numel(),
            complete=(self.routing.complete and d.packing.per_route) or d.packing.even,
            segment=d.rows_per_pair if d.even else None,
        )
        if d.even and d.budget is not None:
            return
        counts = self._full_pack.counts.unsqueeze(1)
        if d.budget is None:
            experts = route_counts(ids, self.spec.num_experts)
            counts = torch.cat([counts, experts.view(num_ranks, -1)], dim=1)
        self._sent_RC, self._received_RC = counts.contiguous(), torch.empty_like(counts)
        self._ticket, ones = new_ticket(self.layer), torch.ones(num_ranks, dtype=torch.int64)
        tag = "dispatch.counts"
        start_(self._received_RC, self._sent_RC, ones, ones, self.channel.id, self._ticket, tag)

    @cached_property
    def sizes(self) -> _Sizes:
        """Wait for the counts. Eager: read them, the one host read."""
        d, num_ranks = self.dispatcher, self.channel.size
        if self._histogram is not None:
            self._count()
        pairs = torch.full((num_ranks,), d.rows_per_pair)
        most = num_ranks * d.rows_per_pair
        if d.even and d.budget is not None:
            return _Sizes(pairs, pairs, most, most, d.budget)
        wait_(self._received_RC, self.channel.id, self._ticket)
        if d.budget is not None:
            send, recv = self._sent_RC[:, 0], self._received_RC[:, 0]
            return _Sizes(send, recv, self._full_pack.row_of_slot.numel(), most, d.budget)
        sent, received = torch.stack([self._sent_RC, self._received_RC]).tolist()
        leave, arrive = [row[0] for row in sent], [row[0] for row in received]
        per_expert = [sum(column) for column in zip(*(row[1:] for row in received))]
        ends = list(itertools.accumulate(-(-n // d.align) * d.align for n in per_expert))
        exact = (sum(per_expert), ends)
        if d.even:
            return _Sizes(pairs, pairs, most, most, ends[-1], *exact)
        return _Sizes(torch.tensor(leave), torch.tensor(arrive), sum(leave), sum(arrive), ends[-1], *exact)

    @cached_property
    def pack(self) -> RowLayout:
        """Columns of the tokens in the order in which their rows leave."""
        eager = self.dispatcher.budget is None
        exact = eager and not self.dispatcher.even
        return self._full_pack.trim(self.sizes.num_sent) if exact else self._full_pack

    def rows(self) -> int:
        return self.sizes.num_slots if self.channel.size > 1 else self._alone_slots()

    def _alone_slots(self) -> int:
        """One rank: nothing is sent, and the total bounds what is needed."""
        budget, routes = self.dispatcher.budget, self.routing.expert_ids.numel()
        if budget is not None:
            return budget
        return routes + min(self.num_local, routes) * (self.dispatcher.align - 1)

    def row_ids(self) -> Tensor:
        """`[N, J]` int64: local ids of each packed row's routes on its rank, -1 for routes of other ranks."""
        pack, num_local = self.pack, self.num_local
        if not len(self.expert_ids):  # even packing still sends its rows
            return self.expert_ids.new_full((pack.row_of_slot.numel(), self.routes_per_row), -1)
        if self.dispatcher.packing.per_route:
            ids = self.expert_ids.reshape(-1, 1).index_select(0, pack.row_of_slot.clamp(min=0))
            local = ids % num_local
            known = pack.every_slot
            return local if known else local.masked_fill_((pack.row_of_slot < 0).unsqueeze(1), -1)
        column = pack.row_of_slot
        token = torch.div(column, self.columns, rounding_mode="floor").clamp(min=0)
        first = ((column % self.columns) * num_local).unsqueeze(1)
        local = self.expert_ids.index_select(0, token) - first
        outside = (local < 0) | (local >= num_local)
        if not pack.every_slot:
            outside |= (column < 0).unsqueeze(1)
        return local.masked_fill_(outside, -1)

    def row_weights(self) -> Tensor:
        """`[N, J]` fp32: routing weights in the same places."""
        weights = self.routing.weights
        if self.dispatcher.packing.per_route:
            return rows_to_slots(weights.reshape(-1, 1), self.pack)
        return tokens_to_slots(weights, self.pack, top_k=self.columns)

    def arrange(self, ids_NJ: Tensor) -> RowLayout:
        """Expert-major order of received rows' routes; notes what was needed."""
        d, sizes = self.dispatcher, None if self.channel.size == 1 else self.sizes
        if sizes is not None and d.budget is not None and not d.even:
            # The buffer is larger than what arrived; ids past it are whatever was in memory.
            row = torch.arange(sizes.num_received, device=ids_NJ.device)
            here = row < sizes.recv.sum().to(row.device)
            ids_NJ = torch.where(here.unsqueeze(1), ids_NJ, -1)
        layout = expert_layout(
            ids_NJ.reshape(-1),
            num_experts=self.num_local,
            alignment=d.align,
            num_slots=self.rows(),
            complete=(self.routing.complete and self.channel.size == 1) or self._all_routes_arrive(),
            num_rows=None if sizes is None else sizes.num_routes,
            may_overflow=d.budget is not None,
        )
        if self._histogram is None and d.counter is not None:
            dropped = layout.counts.sum() - (layout.slot_of_row >= 0).sum()
            d.counter.note(self.layer, needed=layout.needed, dropped=dropped)
        self.unpack = layout
        return layout

    def _all_routes_arrive(self) -> bool:
        d = self.dispatcher
        return d.packing.per_route and d.budget is None and self.channel.size > 1 and not d.even


@dataclass
class _PendingReceived:
    plan: PackedPlan
    rows: tuple[Transfer, Tensor]
    routes: tuple[Transfer, WithIds, Tensor]

    def wait(self) -> Received:
        transfer, codec, token = self.routes
        weights_NJ = transfer.finish(token)
        layout = self.plan.arrange(codec.ids)  # while the rows travel
        rows_NH = self.rows[0].finish(self.rows[1])
        return _received(self.plan, layout, rows_NH, weights_NJ)


@dataclass
class _PendingAlone:
    plan: PackedPlan
    x: Tensor

    def wait(self) -> Received:
        layout = self.plan.arrange(self.plan.expert_ids)
        return _received(self.plan, layout, self.x, self.plan.routing.weights)


def _received(plan: PackedPlan, layout: RowLayout, rows_NH: Tensor, weights_NJ: Tensor) -> Received:
    host_offsets = None if plan.channel.size == 1 else plan.sizes.host_offsets
    return Received(
        tokens_to_slots(rows_NH, layout, top_k=plan.routes_per_row),
        rows_to_slots(weights_NJ.reshape(-1), layout),
        layout.offsets,
        host_offsets,
        exact=host_offsets is not None or layout.every_slot,
    )


@dataclass
class _PendingCombined:
    plan: PackedPlan
    transfer: Transfer | None
    value: Tensor

    def wait(self) -> Tensor:
        if self.transfer is None:
            return self.value
        back_NH = self.transfer.finish(self.value)
        return sum_routes(back_NH, self.plan.pack, top_k=self.plan.columns)


class PackedDispatcher(Counting):
    """Moves rows with `all_to_all_single`. See the module.

    Args:
        name: The option's name, such as `alltoall`.
        packing: What a row that travels stands for.
        capacity_factor: None: eager. A number: static, with room for that many times the mean load per rank.
        alignment: Rows per expert are padded to a multiple of this and of what the experts ask for.
        wire_dtype: `model`, or `mxfp8` for the rows of dispatch forward and combine backward.
        capped: Routes that would not fit are left out before anything travels, from a histogram of all ranks.
    """

    transport = "torch"

    def __init__(
        self,
        *,
        name: str,
        packing: Packing,
        capacity_factor: float | None = None,
        alignment: int = 1,
        wire_dtype: str = "model",
        capped: bool = False,
    ) -> None:
        self.name, self.packing, self.capacity_factor = name, packing, capacity_factor
        self.own_alignment, self.codec = alignment, MXFP8() if wire_dtype == "mxfp8" else None
        self.capped = capped and capacity_factor is not None
        self.align = alignment
        self.rows_per_pair = 0
        self.even = self.fixed = False

    @property
    def wired(self) -> tuple[Channel, DispatchSpec]:
        assert self._channel is not None and self._spec is not None, "wire() first"
        return self._channel, self._spec

    def wire(self, *, group: dist.ProcessGroup | None, spec: DispatchSpec, link: Link) -> None:
        self._spec, self._channel = spec, Channel(group, link)
        num_ranks = self._channel.size
        if spec.num_experts % num_ranks:
            raise ValueError(
                f"model.num_experts={spec.num_experts}: expected a multiple of the expert-parallel size {num_ranks}"
            )
        if self.codec is not None and spec.hidden_size % 32:
            raise ValueError(
                f"dispatcher.wire_dtype=mxfp8: expected model.hidden_size to be a multiple of 32, not "
                f"{spec.hidden_size}; set dispatcher.wire_dtype=model"
            )
        self.align = math.lcm(self.own_alignment, spec.alignment)
        static = self.capacity_factor is not None
        self.even = self.packing.even or (static and spec.device.type == "cuda")
        self.fixed = static or self.even
        if static:
            assert self.capacity_factor is not None
            self.budget = receive_budget(self.capacity_factor, spec, alignment=self.align)
            self.counter = RowCounter(spec.num_layers, spec.device)
        num_local = spec.num_experts // num_ranks
        self.rows_per_pair = self.packing.rows_per_pair(spec.max_tokens, spec.top_k, num_local)

    def plan(self, routing: Routing, *, layer: int = 0) -> PackedPlan:
        return PackedPlan(self, routing, layer)

    def dispatch(self, x: Tensor, plan: PackedPlan) -> _PendingReceived | _PendingAlone:
        channel, _ = self.wired
        if channel.size == 1:
            return _PendingAlone(plan, x)
        sizes = plan.sizes
        ids = WithIds(plan.row_ids())
        weights_NJ = plan.row_weights()
        rows_NH = tokens_to_slots(x, plan.pack, top_k=plan.columns)
        routes = Transfer(channel, sizes.send, sizes.recv, "dispatch.routes", plan.layer, codec=ids)
        rows = Transfer(channel, sizes.send, sizes.recv, "dispatch", plan.layer, codec=self.codec)
        routes_token = routes.start(weights_NJ, num_received=sizes.num_received)
        rows_token = rows.start(rows_NH, num_received=sizes.num_received)
        return _PendingReceived(plan, (rows, rows_token), (routes, ids, routes_token))

    def combine(self, rows: Tensor, plan: PackedPlan) -> _PendingCombined:
        channel, _ = self.wired
        assert plan.unpack is not None, "combine before dispatch"
        summed_NH = sum_routes(rows, plan.unpack, top_k=plan.routes_per_row)
        if channel.size == 1:
            return _PendingCombined(plan, None, summed_NH)
        sizes = plan.sizes
        transfer = Transfer(channel, sizes.recv, sizes.send, "combine", plan.layer, backward_codec=self.codec)
        return _PendingCombined(plan, transfer, transfer.start(summed_NH, num_received=sizes.num_sent))
