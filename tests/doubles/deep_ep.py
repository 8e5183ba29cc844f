"""A double of `deep_ep` on its main branch: `ElasticBuffer` in expand mode.

It holds callers to what the library's documentation and source say.

    deep_ep = DeepEP()          # in place of the module
    buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=64, hidden=256, num_topk=2)

Legend: T tokens, K routes per token, H features, E experts, R ranks, L local experts, P output rows, A alignment.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.doubles.rules import (
    Corruption,
    DeviceAssert,
    Input,
    Placement,
    Stream,
    TeardownOrder,
    UseAfterFree,
    current_stream,
    fill,
    garbage,
    garbage_,
    place,
    require,
    send_back,
    sum_rows,
    together,
)

TOPK_IDX = torch.int64  # topk_idx_t is int64 unless built otherwise


def align_up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


class EventOverlap:
    """With `async_with_compute_stream=True` results may be used after `current_stream_wait`."""

    def __init__(self, stream: Stream | None, mark: int) -> None:
        self.stream, self.mark = stream, mark

    def current_stream_wait(self) -> None:
        if self.stream is not None:
            stream, mark = self.stream, self.mark
            current_stream().enqueue(lambda: stream.run_until(mark))


@dataclass(eq=False)
class EPHandle:
    """Fields are device tensors, uninitialised until the work has run when there was no CPU sync."""

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: Tensor  # a copy
    psum_num_recv_tokens_per_scaleup_rank: Tensor
    psum_num_recv_tokens_per_expert: Tensor
    num_unaligned_recv_tokens_per_expert: Tensor
    recv_src_metadata: Tensor
    num_recv_tokens_per_expert_list: list[int] = field(default_factory=list)  # empty without sync
    _placement: Placement | None = None
    _rows: int = 0
    _index: int = 0


class ElasticBuffer:
    """`library` is set by `DeepEP`."""

    library: DeepEP

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        sized = num_bytes is not None or (num_max_tokens_per_rank > 0 and hidden > 0)
        require(sized, "a size in bytes, or max tokens and hidden")
        require(self.size <= 1024, "at most 1024 ranks")
        require(hidden % 256 == 0, "H % 256")
        require(num_topk <= 32, "top-k <= 32")
        require(not use_fp8_dispatch, "double: fp8 is not modelled")
        self.max_tokens, self.hidden = num_max_tokens_per_rank, hidden
        self.deterministic, self.allow_multiple_reduction = deterministic, allow_multiple_reduction
        self.explicitly_destroy, self.alive = explicitly_destroy, True
        self.calls = 0
        self._comm = Stream()
        # maxT may not differ between ranks
        together(
            group, ["ElasticBuffer", num_bytes, num_max_tokens_per_rank, hidden, num_topk, deterministic]
        )
        self.library.log.append("+buffer")

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int) -> int:
        # shells out and divides by zero where no RDMA NIC is found
        raise ZeroDivisionError("integer division or modulo by zero")

    def get_comm_stream(self) -> Stream:
        return self._comm

    def destroy(self) -> None:
        require(self.explicitly_destroy, "destroy() is for explicitly_destroy=True", TeardownOrder)
        require(self.alive, "buffer destroyed twice", TeardownOrder)
        try:
            dist.get_rank(self.group)
        except (ValueError, RuntimeError):
            raise TeardownOrder("process group destroyed before the buffer") from None
        self.alive = False
        self.library.log.append("-buffer")

    def __del__(self) -> None:
        # without explicitly_destroy there is a barrier in __del__, whenever that runs
        if getattr(self, "alive", False) and not self.explicitly_destroy:
            self.library.log.append("-buffer")

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventOverlap | None = None,
        previous_event_before_epilogue: EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Tensor, None, Tensor | None, EPHandle, EventOverlap]:
        self._usable(previous_event, allocate_on_comm_stream)
        self._check_tokens(x)
        cached = handle is not None
        # None means True for a fresh dispatch and False for a cached one
        sync = (not cached) if do_cpu_sync is None else do_cpu_sync
        if handle is not None:
            self._check_cached(handle, x, topk_idx, num_sms, do_expand, sync)
        else:
            most = num_max_tokens_per_rank or self.max_tokens
            handle = self._fresh(
                x, topk_idx, topk_weights, num_experts, most, expert_alignment, num_sms, do_expand
            )
        weights = None if topk_weights is None else Input(topk_weights, "topk_weights")
        layout = None if cached else self._exchange_layout(handle, sync)
        rows = handle._rows
        out = garbage(rows, self.hidden, dtype=x.dtype)  # allocated by the library, filled later
        row_weights = None if weights is None else garbage(rows, dtype=torch.float32)
        tokens = Input(x, "dispatch x")
        call = ["dispatch", handle._index, cached, do_zero_padding]

        def work() -> None:
            if layout is not None:
                layout()
            self._move(handle, call, tokens, weights, out, row_weights)

        event = self._launch(work, previous_event, async_with_compute_stream)
        return out, None, row_weights, handle, event  # recv_topk_idx is None in expand mode

    def _move(
        self,
        handle: EPHandle,
        call: list[Any],
        tokens: Input,
        weights: Input | None,
        out: Tensor,
        row_weights: Tensor | None,
    ) -> None:
        def check() -> None:
            tokens.check()
            if weights is not None:
                weights.check()

        numbers = None if weights is None else weights.get()
        sent = together(self.group, call, (tokens.get(), numbers), check=check)
        placement, do_zero_padding = handle._placement, call[-1]
        assert placement is not None
        for target, which in ((out, 0), (row_weights, 1)):
            if target is not None:
                fill(target, placement.rows, [theirs[which] for theirs in sent], by_route=which == 1)
                if do_zero_padding:  # gap rows are zero only then
                    target[placement.pads()] = 0

    def _usable(self, previous_event: EventOverlap | None, allocate_on_comm_stream: bool) -> None:
        require(self.alive, "the buffer was destroyed", UseAfterFree)
        # previous_event requires allocate_on_comm_stream=True
        require(
            previous_event is None or allocate_on_comm_stream,
            "previous_event without allocate_on_comm_stream",
        )

    def _check_tokens(self, x: Tensor) -> None:
        require(isinstance(x, Tensor), "double: (fp8, scales) is not modelled")
        require(x.dtype == torch.bfloat16, "x: bf16")
        require(x.dim() == 2 and x.shape[1] == self.hidden and x.is_contiguous(), "x: [T, H], contiguous")
        require(self.hidden % 256 == 0, "H % 256")

    def _check_cached(
        self,
        handle: EPHandle,
        x: Tensor,
        topk_idx: Tensor | None,
        num_sms: int,
        do_expand: bool,
        sync: bool,
    ) -> None:
        # in backward: topk_idx=None, explicit num_sms, do_expand again for expand handles
        require(topk_idx is None, "cached dispatch: topk_idx is None")
        require(num_sms == handle.num_sms, f"cached dispatch: num_sms={num_sms}, handle {handle.num_sms}")
        require(do_expand == handle.do_expand, "cached dispatch: do_expand as in the handle", Corruption)
        require(x.shape[0] == handle.topk_idx.shape[0], "cached dispatch: the handle's number of tokens")
        require(not sync, "cached dispatch: no CPU sync")

    def _fresh(
        self,
        x: Tensor,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        num_experts: int | None,
        most: int,
        alignment: int | None,
        num_sms: int,
        do_expand: bool,
    ) -> EPHandle:
        require(do_expand, "double: only expand mode is modelled")
        require(topk_idx is not None and num_experts is not None, "fresh dispatch: topk_idx and num_experts")
        assert topk_idx is not None and num_experts is not None
        require(topk_idx.dtype == TOPK_IDX and topk_idx.is_contiguous(), "topk_idx: topk_idx_t, contiguous")
        require(topk_idx.dim() == 2 and topk_idx.shape[0] == x.shape[0], "topk_idx: [T, K]")
        require(topk_idx.shape[1] <= 32, "top-k <= 32")
        require(num_experts % self.size == 0 and num_experts <= 2048, "experts: multiple of ranks, <= 2048")
        require(num_experts // self.size <= 256, "at most 256 experts per rank")
        require(x.shape[0] <= most <= self.max_tokens, f"T={x.shape[0]} <= maxT={most} <= {self.max_tokens}")
        require(max([-1, *topk_idx.reshape(-1).tolist()]) < num_experts, "topk_idx: no such expert")
        if topk_weights is not None:
            require(
                topk_weights.dtype == torch.float32 and topk_weights.shape == topk_idx.shape, "[T, K] fp32"
            )
            require(topk_weights.is_contiguous(), "topk_weights: contiguous")
        if num_sms == 0:
            self.get_theoretical_num_sms(num_experts, topk_idx.shape[1])
        require(num_sms <= 160, "at most 160 SMs")
        num_local, top_k = num_experts // self.size, topk_idx.shape[1]
        self.calls += 1
        return EPHandle(
            do_expand,
            num_experts,
            alignment or 1,
            most,
            num_sms,
            topk_idx.clone(),
            garbage(self.size, dtype=torch.int32),
            garbage(num_local, dtype=torch.int32),
            garbage(num_local, dtype=torch.int32),
            garbage(0, top_k + 2, dtype=torch.int32),
            _index=self.calls,
        )

    def _exchange_layout(self, handle: EPHandle, sync: bool) -> Callable[[], None] | None:
        """Fill the handle now (CPU sync), or return what fills it when the stream runs."""
        alignment, num_local = handle.expert_alignment, handle.num_experts // self.size
        # the order inside one expert is not deterministic unless asked for
        shuffle = None if self.deterministic else random.Random(self.rank + 1000 * self.calls)

        def work() -> None:
            call = ["layout", handle._index, handle.num_max_tokens_per_rank, alignment, handle.num_sms]
            ids = together(self.group, call, handle.topk_idx)
            p = place(ids, rank=self.rank, num_local=num_local, alignment=alignment, shuffle=shuffle)
            handle._placement = p
            # start of expert i plus its real count
            psum = torch.tensor([begin + count for begin, count in zip(p.begins, p.counts)])
            handle.psum_num_recv_tokens_per_expert.copy_(psum)
            handle.num_unaligned_recv_tokens_per_expert.copy_(torch.tensor(p.counts))
            sources = [
                {(row.source, row.token) for row in p.rows if row.source <= r} for r in range(self.size)
            ]
            handle.psum_num_recv_tokens_per_scaleup_rank.copy_(torch.tensor([len(s) for s in sources]))

        if sync:
            current_stream().synchronize()
            work()
            assert handle._placement is not None
            handle._rows = handle._placement.needed
        else:
            # no CPU sync = worst-case allocation only; there is no budget and no drop
            top_k = handle.topk_idx.shape[1]
            most = self.size * handle.num_max_tokens_per_rank * min(top_k, num_local)
            handle._rows = align_up(most + (alignment - 1) * num_local, alignment)
        handle.recv_src_metadata = garbage(handle._rows, handle.topk_idx.shape[1] + 2, dtype=torch.int32)
        return None if sync else work

    def _launch(
        self, work: Callable[[], None], previous: EventOverlap | None, asynchronous: bool
    ) -> EventOverlap:
        """An own stream; it waits for the current one or for `previous_event`."""
        compute = current_stream()
        before, mark = (compute, compute.mark()) if previous is None else (previous.stream, previous.mark)
        if before is not None:
            self._comm.enqueue(lambda: before.run_until(mark))
        self._comm.enqueue(work)
        event = EventOverlap(self._comm, self._comm.mark())
        if asynchronous:
            return event
        event.current_stream_wait()
        return EventOverlap(None, 0)

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventOverlap | None = None,
        previous_event_before_epilogue: EventOverlap | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        self._usable(previous_event, allocate_on_comm_stream)
        self._check_tokens(x)  # bf16 only, H % 256
        # only compact mode fixes the number of rows; here they must hold every slot of the handle.
        most = handle._rows
        require(x.shape[0] <= most, f"combine: {x.shape[0]} rows, the handle has {most}")
        require(bias is None, "double: bias is not modelled")
        num_sms = num_sms or handle.num_sms
        require(num_sms == handle.num_sms, f"combine: num_sms={num_sms}, handle {handle.num_sms}")
        num_tokens, top_k = handle.topk_idx.shape
        rows, numbers = Input(x, "combine x"), None
        out, weights = garbage(num_tokens, self.hidden, dtype=x.dtype), None
        if topk_weights is not None:
            # expand mode, topk_weights only with allow_multiple_reduction (otherwise device assert)
            require(
                self.allow_multiple_reduction, "topk_weights without allow_multiple_reduction", DeviceAssert
            )
            require(topk_weights.dtype == torch.float32, "topk_weights: fp32")
            require(tuple(topk_weights.shape) == (x.shape[0],), "topk_weights: one per row")
            require(topk_weights.is_contiguous(), "topk_weights: contiguous")
            numbers = Input(topk_weights, "combine topk_weights")
            weights = garbage(num_tokens, top_k, dtype=torch.float32)

        def work() -> None:
            placement = handle._placement
            assert placement is not None

            def check() -> None:
                rows.check()
                if numbers is not None:
                    numbers.check()
                last = placement.rows[-1].slot if placement.rows else -1
                require(x.shape[0] > last, f"combine: slot {last} read from {x.shape[0]} rows", Corruption)

            call = ["combine", handle._index, numbers is not None]
            get = None if numbers is None else numbers.get
            routes = send_back(self.group, call, placement.rows, rows.get, get, check=check)
            sum_rows(out, sorted(routes, key=lambda route: (route[0].token, route[0].k)))  # sums only
            if weights is not None:
                garbage_(weights)  # nothing is said of -1 routes
                for row, _, number in routes:
                    weights[row.token, row.k] = number

        return out, weights, self._launch(work, previous_event, async_with_compute_stream)


class DeepEP:
    """The module, main branch: it has `ElasticBuffer` and no `HybridEPBuffer`."""

    topk_idx_t = TOPK_IDX
    __version__ = "2.1.0"

    def __init__(self) -> None:
        self.log: list[str] = []
        self.ElasticBuffer = type("ElasticBuffer", (ElasticBuffer,), {"library": self})

    def check_closed(self) -> None:
        """Raises TeardownOrder if a buffer is left."""
        left = self.log.count("+buffer") - self.log.count("-buffer")
        require(left == 0, f"{left} buffers were never destroyed", TeardownOrder)
