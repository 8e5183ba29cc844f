"""`dispatcher=deep_ep`: DeepEP v2 (`ElasticBuffer`) in expand mode, or the same contract on torch.distributed.

Used of the library (main branch, read at dd758ca): `do_expand=True`, where one row arrives per (token, local expert),
grouped by expert; backward as the reverse calls on the same handle.

The library has no budget: without a host read it allocates the worst case. Where a budget is wanted, routes that would
land past it are masked before anything travels, from a histogram of all ranks (`cap.py`), and the experts get the
first rows of the library's buffer. Memory stays that of the worst case, see `worst_case_rows`.

Inside an expert the order of rows changes from call to call, and with it the last bits of weight gradients; under
`torch.use_deterministic_algorithms` the library sorts, which costs time and a host read.

Legend: T tokens, K routes per token, H features, L local experts, R ranks, S slots.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from sidestream.dispatch.base import DispatchSpec, Received, Routing
from sidestream.dispatch.cap import cap_routing, needed_rows
from sidestream.dispatch.library import LibraryDispatcher, PendingCall, buffers, known_weights, received
from sidestream.dispatch.packed import Histogram
from sidestream.dispatch.switch import LibrarySwitch
from sidestream.exchange.call import Call, adopt

log = logging.getLogger(__name__)

# Left to itself the library asks the system for its network cards and can fail where there are none.
NUM_SMS = 20


class DeepEPDispatcher(LibrarySwitch):
    """See `LibrarySwitch`."""

    name = "deep_ep"
    module = "deep_ep"
    capped = True

    def make_library(self) -> Any:
        return DeepEPLibrary(
            capacity_factor=self.capacity_factor, alignment=self.alignment, wire_dtype=self.wire_dtype
        )


class Handle:
    """The library's handle, once its dispatch has been called."""

    value: Any = None


class DeepEPPlan:
    """One routing. With a budget the histogram of routes is on its way when it is made."""

    def __init__(self, dispatcher: DeepEPLibrary, routing: Routing, layer: int) -> None:
        dispatcher.check_tokens(routing)
        self.dispatcher, self.routing, self.layer = dispatcher, routing, layer
        self.handle = Handle()
        self.num_rows: int | None = None
        self._histogram = self._count() if dispatcher.budget is not None else None

    def _count(self) -> Histogram:
        channel, spec = self.dispatcher.wired
        return Histogram(self.routing.expert_ids, spec, channel)

    def capped(self) -> Routing:
        """The routing without what would land past the budget. Call once."""
        d, ids = self.dispatcher, self.routing.expert_ids
        if self._histogram is None:
            return self.routing
        assert d.budget is not None
        histogram_RE, sizes = self._histogram.wait(), {"num_local": d.num_local, "alignment": d.align}
        rank = d.wired[0].rank
        kept = cap_routing(ids, histogram_RE, rank=rank, budget=d.budget, **sizes)
        needed = needed_rows(histogram_RE, rank=rank, **sizes)
        d.note(self.layer, needed, (ids >= 0).sum() - (kept >= 0).sum())
        return Routing(kept, self.routing.weights)

    def rows(self) -> int:
        """Eager: known after dispatch, where the host reads; asked for before, it is a collective of its own."""
        if self.num_rows is None:
            d = self.dispatcher
            if d.budget is not None:
                self.num_rows = d.visible_rows
            else:
                counts_RE, sizes = self._count().wait(), {"num_local": d.num_local, "alignment": d.align}
                self.num_rows = int(needed_rows(counts_RE, rank=d.wired[0].rank, **sizes))
        return self.num_rows


class DeepEPLibrary(LibraryDispatcher):
    """The adapter. See `LibraryDispatcher`."""

    name = "deep_ep"
    distribution = "deep_ep"

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._buffer: Any = None

    @property
    def worst_case_rows(self) -> int:
        """Rows that the library allocates per dispatch when the host reads nothing, whatever the budget."""
        channel, spec = self.wired
        routes = channel.size * spec.max_tokens * min(spec.top_k, self.num_local)
        return -(-(routes + (self.align - 1) * self.num_local) // self.align) * self.align

    @property
    def visible_rows(self) -> int:
        """Rows that the experts get with a budget: nothing lies past it, nor past the worst case."""
        assert self.budget is not None
        return min(self.budget, self.worst_case_rows)

    def check(self, spec: DispatchSpec) -> None:
        if spec.dtype != torch.bfloat16:
            raise ValueError(
                f"dispatcher={self.name}: rows of {spec.dtype}, and the library sums bf16; "
                f"set trainer.precision=bf16-mixed"
            )
        filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        if torch.are_deterministic_algorithms_enabled() and filling:
            raise ValueError(
                f"dispatcher={self.name}: under torch.use_deterministic_algorithms torch fills new memory on a stream "
                f"that the library knows nothing of; set torch.utils.deterministic.fill_uninitialized_memory=False"
            )

    def open(self) -> None:
        channel, spec = self.wired
        self._buffer = self.library.ElasticBuffer(
            channel.group,
            num_max_tokens_per_rank=spec.max_tokens,
            hidden=spec.hidden_size,
            num_topk=spec.top_k,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            # Weight gradients come back in expand mode only with it.
            allow_multiple_reduction=True,
            # Else the destructor is a collective.
            explicitly_destroy=True,
        )
        if self.budget is not None and channel.rank == 0:
            log.info(
                "dispatcher=%s: a budget of %d rows; the library allocates %d per dispatch, its worst case",
                self.name,
                self.budget,
                self.worst_case_rows,
            )

    def release(self) -> None:
        self._buffer.destroy()
        self._buffer = None

    # Calls.

    def _dispatch(self, handle: Handle, outs: list[Tensor], ins: list[Tensor]) -> None:
        """Tokens, weights and ids in; rows, row weights and the ends of the experts' real rows out."""
        (x, weights, ids), (_, spec) = ins, self.wired
        rows, _, row_weights, handle.value, _ = self._buffer.dispatch(
            x,
            ids.to(self.library.topk_idx_t),  # int64 unless it was built otherwise
            weights,
            num_experts=spec.num_experts,
            num_max_tokens_per_rank=spec.max_tokens,
            expert_alignment=self.align,
            num_sms=NUM_SMS,
            do_cpu_sync=self.budget is None,
            do_expand=True,
            do_zero_padding=True,
        )
        visible = None if self.budget is None else self.visible_rows
        adopt(outs[0], rows[:visible])
        adopt(outs[1], row_weights[:visible])
        adopt(outs[2], handle.value.psum_num_recv_tokens_per_expert)

    def _combine(self, handle: Handle, outs: list[Tensor], ins: list[Tensor]) -> None:
        out, _, _ = self._buffer.combine(ins[0], handle.value, num_sms=handle.value.num_sms)
        adopt(outs[0], out)

    def _dispatch_backward(self, handle: Handle, outs: list[Tensor], ins: list[Tensor]) -> None:
        grad_x, grad_weights, _ = self._buffer.combine(
            ins[0], handle.value, topk_weights=ins[1], num_sms=handle.value.num_sms
        )
        adopt(outs[0], grad_x)
        adopt(outs[1], grad_weights)

    def _combine_backward(self, handle: Handle, num_rows: int, outs: list[Tensor], ins: list[Tensor]) -> None:
        # A cached call takes neither the number of SMs nor the mode from its handle.
        rows, _, _, _, _ = self._buffer.dispatch(
            ins[0],
            handle=handle.value,
            num_sms=handle.value.num_sms,
            do_expand=True,
            do_zero_padding=True,
        )
        adopt(outs[0], rows[:num_rows])

    # The protocol.

    def plan(self, routing: Routing, *, layer: int = 0) -> DeepEPPlan:
        return DeepEPPlan(self, routing, layer)

    def dispatch(self, x: Tensor, plan: DeepEPPlan) -> PendingCall:
        channel, _ = self.wired
        routing, handle, none = plan.capped(), plan.handle, (0,)
        call = Call(
            channel,
            "dispatch",
            forward=lambda outs, ins: self._dispatch(handle, outs, ins),
            outs=buffers(x.device, (none, x.dtype), (none, torch.float32), (none, torch.int32)),
            num_differentiable=2,
            backward=lambda outs, ins: self._dispatch_backward(handle, outs, ins),
            grads=buffers(x.device, (none, x.dtype), (none, torch.float32)),
        )
        started = call.start(x, known_weights(routing), extra=(routing.expert_ids,))

        def then(rows_SH: Tensor, weights_S: Tensor) -> Received:
            plan.num_rows = rows_SH.shape[0]
            real_ends_L = call.extras[0].to(torch.int64)
            ends_L = torch.div(real_ends_L + (self.align - 1), self.align, rounding_mode="floor") * self.align
            return received(rows_SH, weights_S, ends_L, exact=self.budget is None)

        return PendingCall(call, started, then)

    def combine(self, rows: Tensor, plan: DeepEPPlan) -> PendingCall:
        channel, _ = self.wired
        handle, num_rows, none = plan.handle, rows.shape[0], (0,)
        call = Call(
            channel,
            "combine",
            forward=lambda outs, ins: self._combine(handle, outs, ins),
            outs=buffers(rows.device, (none, rows.dtype)),
            backward=lambda outs, ins: self._combine_backward(handle, num_rows, outs, ins),
            grads=buffers(rows.device, (none, rows.dtype)),
        )
        return PendingCall(call, call.start(rows), lambda out: out)
