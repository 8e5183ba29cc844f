"""`dispatcher=nccl_ep`: NCCL EP in high-throughput mode, or the same contract on torch.distributed.

Used of the library (nccl-extensions 0.1.0, read at 44d2de0): expert-major layout, where one row arrives per (token,
local expert); static budgets with DROP; backward as the reverse calls on the same handle.

    plan      the handle takes the routing: ranks exchange it, rows are counted
    dispatch  tokens and weights -> rows and row weights          backward: BWD combine
    combine   rows, weighted by the experts -> their sums         backward: BWD dispatch

Legend: T tokens, K routes per token, H features, L local experts, S slots.
"""

from __future__ import annotations

import itertools
import math
import weakref
from typing import Any

import torch
from torch import Tensor

from sidestream.dispatch.base import DispatchSpec, Routing
from sidestream.dispatch.library import (
    LibraryDispatcher,
    PendingCall,
    buffers,
    known_weights,
    load,
    received,
)
from sidestream.dispatch.switch import LibrarySwitch
from sidestream.exchange.call import Call

# With more communication SMs than this, release 0.1.0 hangs (nccl-extensions #14).
MAX_SMS = 16
# Older releases want the bound on tokens to be a multiple.
TOKENS_UNIT = 64


class NcclEPDispatcher(LibrarySwitch):
    """See `LibrarySwitch`."""

    name = "nccl_ep"
    module = "nccl.ep"

    def make_library(self) -> Any:
        return NcclEPLibrary(
            capacity_factor=self.capacity_factor, alignment=self.alignment, wire_dtype=self.wire_dtype
        )


def most_tokens(spec: DispatchSpec) -> int:
    """Bound on the tokens of a rank as the library takes it."""
    return -(-spec.max_tokens // TOKENS_UNIT) * TOKENS_UNIT


class Slot:
    """A library handle, or room for one, and what it points to."""

    def __init__(self) -> None:
        self.handle: Any = None
        # The library may read the ids as long as the handle has this routing.
        self.ids: Tensor | None = None


class Lease:
    """The use of a slot by one plan; ends with its backward, or when nobody can use the plan any more.

    Ranks must take slots in the same order, so nothing here may be part of a reference cycle: then a lease ends at
    the same point of the program everywhere.
    """

    def __init__(self, pool: list[Slot]) -> None:
        self._slot = pool.pop() if pool else Slot()
        self._finalizer = weakref.finalize(self, pool.append, self._slot)
        self._finalizer.atexit = False

    @property
    def slot(self) -> Slot:
        assert self._finalizer.alive, "the backward of this plan is done"
        return self._slot

    def release(self) -> None:
        """Give the slot back; later uses are errors."""
        self._finalizer()


class NcclEPPlan:
    """One routing: a handle that has it, and the counts, which are on their way when it is made."""

    def __init__(self, dispatcher: NcclEPLibrary, routing: Routing, layer: int) -> None:
        dispatcher.check_tokens(routing)
        channel, spec = dispatcher.wired
        self.dispatcher, self.routing, self.layer = dispatcher, routing, layer
        self.lease = Lease(dispatcher.free)
        self._counts: tuple[Tensor, Tensor] | None = None
        self._host: list[int] | None = None
        device, num_local = spec.device, dispatcher.num_local
        self._call = Call(
            channel,
            "dispatch.counts",
            forward=dispatcher.take_routing(self.lease),
            outs=buffers(device, ((num_local,), torch.int32), ((1,), torch.int32)),
        )
        self._call.launch(routing.expert_ids)

    def counts(self) -> tuple[Tensor, Tensor]:
        """`[L]` int32 padded rows per expert within the budget, and `[1]` rows needed before any drop."""
        if self._counts is None:
            counters_L, total = self._call.join()
            self._counts = counters_L, total
            if self.dispatcher.budget is not None:
                self.dispatcher.note(self.layer, total.to(torch.int64))
        return self._counts

    def rows(self) -> int:
        if self.dispatcher.budget is not None:
            return self.dispatcher.budget
        if self._host is None:  # the one host read
            *counters, total = torch.cat(self.counts()).tolist()
            self._host = list(itertools.accumulate(counters))
            assert self._host[-1] == total, f"expert_counters add up to {self._host[-1]}, not {total}"
        return self._host[-1]

    @property
    def host_offsets(self) -> list[int] | None:
        return self._host


class NcclEPLibrary(LibraryDispatcher):
    """The adapter. See `LibraryDispatcher`.

    Every plan in flight has a handle of its own, because the library keeps the routing in it. Handles are reused:
    making one allocates, giving it another routing does not.
    """

    name = "nccl_ep"
    distribution = "nccl-extensions"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.free: list[Slot] = []
        self._slots: list[Slot] = []
        self._comm: Any = None
        self._group: Any = None

    def import_library(self) -> tuple[Any, str | None]:
        return load(self.name, "nccl.ep.interop.torch")

    def check(self, spec: DispatchSpec) -> None:
        most = most_tokens(spec)
        if self.budget is not None and self.budget < most:
            enough = math.ceil(1000 * most / (spec.max_tokens * spec.top_k)) / 1000
            raise ValueError(
                f"dispatcher={self.name}: a buffer of {self.budget} rows, and the library wants room for the {most} "
                f"tokens of a rank; set dispatcher.capacity_factor={enough:g}"
            )

    def open(self) -> None:
        channel, _ = self.wired
        self._comm = self.library.interop.torch.get_nccl_comm_from_group(channel.group)
        self._open_group()

    def _open_group(self) -> None:
        (_, spec), ep = self.wired, self.library
        policy = ep.OverflowPolicy.AUTO if self.budget is None else ep.OverflowPolicy.DROP
        config = ep.GroupConfig(
            algorithm=ep.Algorithm.HIGH_THROUGHPUT,
            num_experts=spec.num_experts,
            max_dispatch_tokens_per_rank=most_tokens(spec),
            max_recv_tokens_per_rank=self.budget or 0,
            max_token_bytes=spec.hidden_size * spec.dtype.itemsize,
            max_num_sms=MAX_SMS,
            overflow_policy=policy,
            num_topk=spec.top_k,
        )
        self._group = ep.Group.create(self._comm, config)

    def reopen(self) -> None:
        self._close_group()
        self._open_group()

    def _close_group(self) -> None:
        for slot in self._slots:
            slot.handle.destroy()
            slot.handle = slot.ids = None
        self._slots.clear()
        if self._group is not None:
            self._group.destroy()
        self._group = None

    def release(self) -> None:
        self._close_group()
        self._comm.destroy()
        self._comm = None
        self.free.clear()

    # Calls. Each returns the descriptors it made, which live until the wait like the tensors they describe.

    def take_routing(self, lease: Lease) -> Any:
        """Give the lease's handle a routing, or make it; counts come out."""
        ep, align, lane = self.library, self.align, self.wired[0].lane

        def run(outs: list[Tensor], ins: list[Tensor]) -> Any:
            slot, (ids,) = lease.slot, ins
            info = ep.LayoutInfo(expert_counters=ep.Tensor(outs[0]), recv_total_counter=ep.Tensor(outs[1]))
            topk_idx = ep.Tensor(ids)
            if slot.handle is None:
                slot.handle = self._group.create_handle(
                    ep.Layout.EXPERT_MAJOR,
                    topk_idx,
                    layout_info=info,
                    config=ep.HandleConfig(dispatch_output_per_expert_alignment=align),
                    stream=lane.handle,
                )
                self._slots.append(slot)
            else:
                slot.handle.update(topk_idx, layout_info=info, stream=lane.handle)
            slot.ids = ids
            return topk_idx, info

        return run

    def _dispatch(self, lease: Lease, *, backward: bool) -> Any:
        ep, lane = self.library, self.wired[0].lane

        def run(outs: list[Tensor], ins: list[Tensor]) -> Any:
            if backward:  # no weights in either direction
                inputs = ep.DispatchInputs(tokens=ep.Tensor(ins[0]))
                outputs = ep.DispatchOutputs(tokens=ep.Tensor(outs[0]))
                config = ep.DispatchConfig(pass_direction=ep.PassDir.BWD)
            else:
                inputs = ep.DispatchInputs(tokens=ep.Tensor(ins[0]), topk_weights=ep.Tensor(ins[1]))
                outputs = ep.DispatchOutputs(tokens=ep.Tensor(outs[0]), topk_weights=ep.Tensor(outs[1]))
                config = ep.DispatchConfig(pass_direction=ep.PassDir.FWD)
            lease.slot.handle.dispatch(inputs, outputs, config=config, stream=lane.handle)
            return inputs, outputs, config

        return run

    def _combine(self, lease: Lease, *, backward: bool) -> Any:
        ep, lane = self.library, self.wired[0].lane

        def run(outs: list[Tensor], ins: list[Tensor]) -> Any:
            if backward:  # both weight tensors are mandatory
                inputs = ep.CombineInputs(tokens=ep.Tensor(ins[0]), topk_weights=ep.Tensor(ins[1]))
                outputs = ep.CombineOutputs(tokens=ep.Tensor(outs[0]), topk_weights=ep.Tensor(outs[1]))
                config = ep.CombineConfig(pass_direction=ep.PassDir.BWD)
            else:  # rows come weighted: weights are refused
                inputs = ep.CombineInputs(tokens=ep.Tensor(ins[0]))
                outputs = ep.CombineOutputs(tokens=ep.Tensor(outs[0]))
                config = ep.CombineConfig(pass_direction=ep.PassDir.FWD)
            lease.slot.handle.combine(inputs, outputs, config=config, stream=lane.handle)
            return inputs, outputs, config

        return run

    # The protocol.

    def plan(self, routing: Routing, *, layer: int = 0) -> NcclEPPlan:
        return NcclEPPlan(self, routing, layer)

    def dispatch(self, x: Tensor, plan: NcclEPPlan) -> PendingCall:
        channel, spec = self.wired
        rows, hidden, (tokens, top_k) = plan.rows(), spec.hidden_size, plan.routing.expert_ids.shape
        call = Call(
            channel,
            "dispatch",
            forward=self._dispatch(plan.lease, backward=False),
            outs=buffers(x.device, ((rows, hidden), x.dtype), ((rows,), torch.float32)),
            num_differentiable=2,
            backward=self._combine(plan.lease, backward=True),
            grads=buffers(x.device, ((tokens, hidden), x.dtype), ((tokens, top_k), torch.float32)),
            # The backward of combine comes before.
            done=plan.lease.release,
        )
        started = call.start(x, known_weights(plan.routing))

        def then(rows_SH: Tensor, weights_S: Tensor) -> Any:
            ends_L = plan.counts()[0].cumsum(0)
            exact = self.budget is None
            return received(rows_SH, weights_S, ends_L, exact=exact, host_offsets=plan.host_offsets)

        return PendingCall(call, started, then)

    def combine(self, rows: Tensor, plan: NcclEPPlan) -> PendingCall:
        channel, spec = self.wired
        tokens, hidden = plan.routing.expert_ids.shape[0], spec.hidden_size
        call = Call(
            channel,
            "combine",
            forward=self._combine(plan.lease, backward=False),
            outs=buffers(rows.device, ((tokens, hidden), rows.dtype)),
            backward=self._dispatch(plan.lease, backward=True),
            grads=buffers(rows.device, (tuple(rows.shape), rows.dtype)),
        )
        return PendingCall(call, call.start(rows), lambda out: out)
