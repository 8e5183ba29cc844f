"""`dispatcher=hybrid_ep`: HybridEP (`HybridEPBuffer`), or the same contract on torch.distributed.

Used of the library (branch hybrid-ep, read at 94a9f8f): the permuting calls, where one row arrives per (token, local
expert), grouped by expert; static budgets with its non-blocking mode; backward as the reverse calls on the same handle.

All ranks must pass the same number of tokens, so tokens are padded to the bound on them; and routes go down as a map
`[T, E]` with dense weights, because its own conversion of ids does not take -1.

It tells whether rows were dropped, not how many were needed: that comes from a histogram of all ranks.

Legend: T tokens, U tokens with padding, K routes per token, H features, E experts, L local experts, S slots.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sidestream.dispatch.base import DispatchSpec, Received, Routing
from sidestream.dispatch.cap import needed_rows
from sidestream.dispatch.library import LibraryDispatcher, PendingCall, buffers, received
from sidestream.dispatch.packed import Histogram
from sidestream.dispatch.switch import LibrarySwitch
from sidestream.exchange.call import Call, adopt

# An odd number of tokens hangs (DeepEP #561), and kernels work on chunks of 64.
TOKENS_UNIT = 64


class HybridEPDispatcher(LibrarySwitch):
    """See `LibrarySwitch`."""

    name = "hybrid_ep"
    module = "deep_ep"

    def make_library(self) -> Any:
        return HybridEPLibrary(
            capacity_factor=self.capacity_factor, alignment=self.alignment, wire_dtype=self.wire_dtype
        )


class Dispatched:
    """What the library returned from a dispatch.

    Attributes:
        handle: For the other three calls.
        rows: How many rows its buffers have.
        host_offsets: Inclusive ends of the experts' segments, in blocking mode.
    """

    handle: Any = None
    rows: int = 0
    host_offsets: list[int] | None = None


class HybridEPPlan:
    """One routing. With a budget the histogram of routes is on its way when it is made."""

    def __init__(self, dispatcher: HybridEPLibrary, routing: Routing, layer: int) -> None:
        dispatcher.check_tokens(routing)
        self.dispatcher, self.routing, self.layer = dispatcher, routing, layer
        self.dispatched = Dispatched()
        self.num_rows = dispatcher.budget
        self._histogram = self._count() if dispatcher.budget is not None else None

    def _count(self) -> Histogram:
        channel, spec = self.dispatcher.wired
        return Histogram(self.routing.expert_ids, spec, channel)

    def _needed(self, histogram: Histogram) -> Tensor:
        d = self.dispatcher
        return needed_rows(histogram.wait(), rank=d.wired[0].rank, num_local=d.num_local, alignment=d.align)

    def note(self) -> None:
        """Wait for the histogram and write down what was needed. Call once."""
        if self._histogram is not None:
            self.dispatcher.note(self.layer, self._needed(self._histogram))

    def rows(self) -> int:
        """Eager: known after dispatch, where the host reads; asked for before, it is a collective of its own."""
        if self.num_rows is None:
            self.num_rows = int(self._needed(self._count()))
        return self.num_rows


class HybridEPLibrary(LibraryDispatcher):
    """The adapter. See `LibraryDispatcher`."""

    name = "hybrid_ep"
    distribution = "deep_ep"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._buffer: Any = None

    def check(self, spec: DispatchSpec) -> None:
        if spec.dtype != torch.bfloat16:
            raise ValueError(
                f"dispatcher={self.name}: rows of {spec.dtype}, and the library sums bf16; "
                f"set trainer.precision=bf16-mixed"
            )

    @property
    def padded_tokens(self) -> int:
        """U, the number of tokens that every rank passes."""
        return -(-self.wired[1].max_tokens // TOKENS_UNIT) * TOKENS_UNIT

    def open(self) -> None:
        channel, spec = self.wired
        self._buffer = self.library.HybridEPBuffer(
            channel.group,
            hidden_dim=spec.hidden_size,
            max_num_of_tokens_per_rank=self.padded_tokens,
            num_local_experts=self.num_local,
        )

    def release(self) -> None:
        # It has no method for this: the reference is what keeps it. Calls find it through this object.
        self._buffer = None

    # Calls. Padding, fusion and mode must be the same in all four.

    def _dispatch(self, state: Dispatched, outs: list[Tensor], ins: list[Tensor]) -> None:
        """Tokens, dense weights and map in; rows, row weights and (static) padded counts out."""
        x_UH, weights_UE, map_UE = ins
        rows, row_weights, _, counts_L, state.handle = self._buffer.dispatch_with_permute(
            hidden=x_UH,
            routing_map=map_UE,
            probs=weights_UE,
            num_permuted_tokens=self.budget,
            pad_multiple=self.align,
            non_blocking=self.budget is not None,
        )
        state.rows = rows.shape[0]
        adopt(outs[0], rows)
        adopt(outs[1], row_weights)
        if self.budget is None:  # counts are on the host, and in memory that the library uses again
            state.host_offsets = list(itertools.accumulate(counts_L.tolist()))
        else:
            adopt(outs[2], counts_L)

    def _combine(self, state: Dispatched, outs: list[Tensor], ins: list[Tensor]) -> None:
        out_UH, _ = self._buffer.combine_with_unpermute(
            hidden=ins[0], handle=state.handle, pad_multiple=self.align
        )
        adopt(outs[0], out_UH)

    def _dispatch_backward(self, state: Dispatched, outs: list[Tensor], ins: list[Tensor]) -> None:
        grad_UH, grad_UE = self._buffer.combine_with_unpermute(
            hidden=ins[0], probs=ins[1], handle=state.handle, pad_multiple=self.align
        )
        adopt(outs[0], grad_UH)
        adopt(outs[1], grad_UE)

    def _combine_backward(self, state: Dispatched, outs: list[Tensor], ins: list[Tensor]) -> None:
        rows, _, _, _, _ = self._buffer.dispatch_with_permute(
            hidden=ins[0],
            handle=state.handle,
            num_permuted_tokens=state.rows,
            pad_multiple=self.align,
            non_blocking=self.budget is not None,
        )
        adopt(outs[0], rows)

    # The protocol.

    def plan(self, routing: Routing, *, layer: int = 0) -> HybridEPPlan:
        return HybridEPPlan(self, routing, layer)

    def dense(self, routing: Routing) -> tuple[Tensor, Tensor]:
        """`[U, E]` fp32 weights, zero without a route and differentiable in `routing.weights`, and the bool map."""
        ids, num_experts = routing.expert_ids, self.wired[1].num_experts
        # One more column takes what has no route, whatever its weight; rows of padding tokens stay empty.
        column = torch.where(ids < 0, num_experts, ids)
        shape = (self.padded_tokens, num_experts + 1)
        weights = torch.zeros(shape, device=ids.device).scatter(1, column, routing.weights.float())
        there = torch.zeros(shape, device=ids.device, dtype=torch.bool).scatter_(1, column, True)
        return weights[:, :num_experts], there[:, :num_experts].contiguous()

    def dispatch(self, x: Tensor, plan: HybridEPPlan) -> PendingCall:
        channel, _ = self.wired
        state, none = plan.dispatched, (0,)
        weights_UE, map_UE = self.dense(plan.routing)
        static = self.budget is not None
        counts = (((0,), torch.int64),) if static else ()
        call = Call(
            channel,
            "dispatch",
            forward=lambda outs, ins: self._dispatch(state, outs, ins),
            outs=buffers(x.device, (none, x.dtype), (none, torch.float32), *counts),
            num_differentiable=2,
            backward=lambda outs, ins: self._dispatch_backward(state, outs, ins),
            grads=buffers(x.device, (none, x.dtype), (none, torch.float32)),
        )
        extra = self.padded_tokens - x.shape[0]
        started = call.start(F.pad(x, (0, 0, 0, extra)) if extra else x, weights_UE, extra=(map_UE,))

        def then(rows_SH: Tensor, weights_S: Tensor) -> Received:
            plan.num_rows, ends = rows_SH.shape[0], state.host_offsets
            plan.note()
            if ends is None:
                return received(rows_SH, weights_S, call.extras[0].cumsum(0), exact=False)
            ends_L = torch.tensor(ends, dtype=torch.int64).to(rows_SH.device, non_blocking=True)
            return received(rows_SH, weights_S, ends_L, exact=True, host_offsets=ends)

        return PendingCall(call, started, then)

    def combine(self, rows: Tensor, plan: HybridEPPlan) -> PendingCall:
        channel, _ = self.wired
        state, tokens, none = plan.dispatched, plan.routing.expert_ids.shape[0], (0,)
        call = Call(
            channel,
            "combine",
            forward=lambda outs, ins: self._combine(state, outs, ins),
            outs=buffers(rows.device, (none, rows.dtype)),
            backward=lambda outs, ins: self._combine_backward(state, outs, ins),
            grads=buffers(rows.device, (none, rows.dtype)),
        )
        return PendingCall(call, call.start(rows), lambda out_UH: out_UH[:tokens])
