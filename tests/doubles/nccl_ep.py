"""A double of `nccl.ep`: high-throughput mode, expert-major layout.

It holds callers to what the library's documentation and source say.

    ep = NcclEP()                                   # in place of the module; ep.log records births and deaths
    comm = ep.interop.torch.get_nccl_comm_from_group(group)

Legend: T tokens, K routes per token, H features, E experts, R ranks, L local experts, P rows of the static buffer.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.doubles import nccl_ep_types as types
from tests.doubles.nccl_ep_types import (
    Algorithm,
    CombineConfig,
    CombineInputs,
    CombineOutputs,
    DispatchConfig,
    DispatchInputs,
    DispatchOutputs,
    GroupConfig,
    HandleConfig,
    Layout,
    LayoutInfo,
    OverflowPolicy,
    PassDir,
    Tensor,
)
from tests.doubles.rules import (
    Corruption,
    Hang,
    Placement,
    Pointer,
    Row,
    Stream,
    TeardownOrder,
    Trap,
    UseAfterFree,
    fill,
    garbage_,
    place,
    require,
    send_back,
    sum_rows,
    together,
)

ROW_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # inputs tokens


def _input(tensor: Tensor | None, name: str) -> Pointer:
    require(isinstance(tensor, Tensor), f"{name}: an ep.Tensor is mandatory")
    assert tensor is not None
    tensor.pointer.name = name
    return tensor.pointer.remember()


def _output(tensor: Tensor | None, name: str) -> Pointer:
    require(isinstance(tensor, Tensor), f"{name}: an ep.Tensor is mandatory")
    assert tensor is not None
    tensor.pointer.name = name
    garbage_(tensor.pointer.get())  # caller-allocated, so uninitialised until the stream has run
    return tensor.pointer


class Comm:
    """A new communicator per call, made by a collective over the process group."""

    def __init__(self, library: NcclEP, group: dist.ProcessGroup) -> None:
        self.library, self.group, self.groups, self.alive = library, group, 0, True
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        together(group, ["get_nccl_comm_from_group"])
        library.born("comm")

    def destroy(self) -> None:
        # 1.4 teardown order: handles -> group -> communicator -> dist.destroy_process_group()
        require(self.alive, "communicator destroyed twice", TeardownOrder)
        require(self.groups == 0, "communicator destroyed before its EP group", TeardownOrder)
        try:
            dist.get_rank(self.group)
        except (ValueError, RuntimeError):
            raise TeardownOrder("process group destroyed before the communicator") from None
        self.alive = False
        self.library.died("comm")


class Group:
    """One configuration, equal on all ranks, with its limits."""

    def __init__(self, comm: Comm, config: GroupConfig) -> None:
        self.comm, self.config, self.handles, self.alive = comm, config, 0, True
        self.made = 0
        self.stream: Stream | None = None
        self.limit = config.max_recv_tokens_per_rank  # P; 0 = eager
        self.drops = config.overflow_policy == OverflowPolicy.DROP
        self.num_local = config.num_experts // comm.size
        comm.groups += 1

    @staticmethod
    def create(comm: Comm, config: GroupConfig) -> Group:
        require(comm.alive, "the communicator was destroyed", UseAfterFree)
        c = config
        require(c.algorithm == Algorithm.HIGH_THROUGHPUT, "double: only high-throughput mode is modelled")
        require(c.num_experts > 0 and c.num_experts % comm.size == 0, "num_experts % ranks")
        num_local, most = c.num_experts // comm.size, c.max_dispatch_tokens_per_rank
        require(num_local * comm.size % 4 == 0, "local experts x lsa_team_size must be a multiple of 4")
        require(num_local <= 256, "the default expert-major permute kernel: at most 256 local experts")
        require(c.max_token_bytes > 0 and c.max_token_bytes % 16 == 0, "max_token_bytes % 16")
        require(c.max_token_bytes <= 4 * 16384, "hidden is at most 16384")
        require(0 < most <= 8192, "at most 8192 tokens per rank")
        require(most % 64 == 0, "older libraries need maxT % 64 == 0")
        # a hang with more than 16 communication SMs.
        require(c.max_num_sms <= 16, "more than 16 communication SMs", Hang)
        if c.max_recv_tokens_per_rank == 0:
            require(c.num_topk > 0, "eager expert-major: num_topk is mandatory")  # 1.4 eager
            require(c.overflow_policy != OverflowPolicy.DROP, "eager has no DROP")  # 1.4 eager
        else:
            require(c.max_recv_tokens_per_rank >= most, "static: P >= max tokens per rank")  # 1.4 static
        # "same on all ranks"
        together(comm.group, ["Group.create", repr(c)])
        comm.library.born("group")
        return Group(comm, config)

    def create_handle(
        self,
        layout: Layout,
        topk_idx: Tensor,
        *,
        layout_info: LayoutInfo | None = None,
        config: HandleConfig | None = None,
        stream: Any,
    ) -> Handle:
        """Allocates (control path), then the first update; collective."""
        require(self.alive, "the group was destroyed", UseAfterFree)
        require(layout == Layout.EXPERT_MAJOR, "double: only EXPERT_MAJOR is modelled")
        alignment = (config or HandleConfig()).dispatch_output_per_expert_alignment or 1
        require(alignment & (alignment - 1) == 0, "alignment: a power of two")
        handle = Handle(self, top_k=topk_idx.shape[-1], alignment=alignment)
        handle._set_routing("create_handle", topk_idx, layout_info, stream)
        return handle

    def destroy(self) -> None:
        require(self.alive, "group destroyed twice", TeardownOrder)
        require(self.comm.alive, "communicator destroyed before its EP group", TeardownOrder)
        require(self.handles == 0, f"group destroyed with {self.handles} live handles", TeardownOrder)
        self.alive = False
        self.comm.groups -= 1
        self.comm.library.died("group")


class Handle:
    """One routing. `update` gives it another in the same buffers."""

    def __init__(self, group: Group, *, top_k: int, alignment: int) -> None:
        self.group, self.top_k, self.alignment, self.alive = group, top_k, alignment, True
        self.index, self.num_tokens = group.made, 0
        self.routing: Pointer | None = None
        self.placement: Placement | None = None
        self.flat_lost: set[tuple[int, int]] = set()
        group.made += 1
        group.handles += 1
        group.comm.library.born("handle")

    def _usable(self, stream: Any) -> Stream:
        require(self.alive and self.group.alive and self.group.comm.alive, "handle: destroyed", UseAfterFree)
        require(isinstance(stream, Stream), f"stream={stream!r}: a stream is mandatory")
        # 1.4 streams: calls share the group's staging buffers, so one group is used on one stream
        self.group.stream = self.group.stream or stream
        require(self.group.stream is stream, "calls of one group on two streams", Corruption)
        return stream

    def _ids_alive(self) -> None:
        # "keep topk_idx alive as long as the handle"
        if self.routing is not None:
            self.routing.check()

    def update(self, topk_idx: Tensor, *, layout_info: LayoutInfo | None = None, stream: Any) -> None:
        if self.routing is not None:
            self.routing.get()
        self._set_routing("update", topk_idx, layout_info, stream)

    def _set_routing(self, call: str, topk_idx: Tensor, info: LayoutInfo | None, stream: Any) -> None:
        queue, group = self._usable(stream), self.group
        ids = _input(topk_idx, "topk_idx")
        require(ids.dtype in (torch.int32, torch.int64), "topk_idx: int32 or int64")
        require(len(ids.shape) == 2 and ids.shape[1] == self.top_k, "topk_idx: [T, K], K fixed per handle")
        require(ids.shape[0] <= group.config.max_dispatch_tokens_per_rank, "T <= max tokens per rank")
        if group.config.num_topk:
            require(self.top_k <= group.config.num_topk, "K <= num_topk")
        outputs = self._layout_outputs(info)

        def work() -> None:
            heard = together(group.comm.group, [call, self.index], ids.get().clone(), check=ids.check)
            most = max(int(theirs.max()) if theirs.numel() else -1 for theirs in heard)
            require(most < group.config.num_experts, f"topk_idx: expert {most} does not exist")
            self.routing = ids
            self._place(heard)
            self._write_layout(outputs)

        self.num_tokens = ids.shape[0]
        queue.enqueue(work)

    def _layout_outputs(self, info: LayoutInfo | None) -> dict[str, Pointer]:
        names = ("expert_counters", "expert_offsets", "recv_total_counter")
        given = {name: getattr(info, name) for name in names if getattr(info, name, None) is not None}
        outputs = {name: _output(tensor, name) for name, tensor in given.items()}
        dtypes = {pointer.dtype for pointer in outputs.values()}
        # 1.4 rule: all integer outputs of one LayoutInfo share one dtype; EXPERT_MAJOR: int32 or int64
        require(len(dtypes) <= 1, "integer outputs of one LayoutInfo share one dtype")
        require(dtypes <= {torch.int32, torch.int64}, "integer outputs: int32 or int64")
        for name, pointer in outputs.items():
            size = 1 if name == "recv_total_counter" else self.group.num_local
            require(tuple(pointer.shape) == (size,), f"{name}: [{size}]")
        return outputs

    def _place(self, ids_of_rank: list[torch.Tensor]) -> None:
        comm, limit = self.group.comm, self.group.limit
        # order inside an expert is source rank, then token.
        self.placement = place(
            ids_of_rank, rank=comm.rank, num_local=self.group.num_local, alignment=self.alignment
        )
        # 1.4 DROP: P also bounds the FLAT staging, where a token lies once; late source tokens are lost.
        flat = sorted({(row.source, row.token) for row in self.placement.rows})
        self.flat_lost = set(flat[limit:]) if limit and self.group.drops else set()

    def _write_layout(self, outputs: dict[str, Pointer]) -> None:
        assert self.placement is not None
        p, limit = self.placement, self.group.limit
        most = limit if limit and self.group.drops else p.needed
        values = {
            # padded counts, clamped under DROP; offsets are exclusive starts
            "expert_counters": [min(e, most) - min(b, most) for b, e in zip(p.begins, p.ends)],
            "expert_offsets": [min(b, most) for b in p.begins],
            "recv_total_counter": [p.needed],  # always the pre-drop requirement
        }
        for name, pointer in outputs.items():
            out = pointer.get()
            out.copy_(torch.tensor(values[name], dtype=out.dtype))

    def _rows(self) -> list[Row]:
        """Rows that have a slot."""
        assert self.placement is not None
        limit = self.group.limit or self.placement.needed
        return [row for row in self.placement.rows if row.slot < limit]

    def _check_size(self, pointer: Pointer, name: str) -> None:
        # 1.4 static: outputs need >= P rows or ncclInvalidArgument
        assert self.placement is not None or self.group.limit
        needed = self.group.limit or self.placement.needed  # type: ignore[union-attr]
        require(pointer.shape[0] >= needed, f"{name}: {pointer.shape[0]} rows where {needed} are needed")

    def _fits(self) -> None:
        p, group = self.placement, self.group
        assert p is not None
        if group.limit and not group.drops and p.needed > group.limit:
            raise Trap(f"{p.needed} rows needed, {group.limit} allocated")  # 1.4 TRAP, the default

    def dispatch(
        self,
        inputs: DispatchInputs,
        outputs: DispatchOutputs,
        *,
        layout_info: LayoutInfo | None = None,
        config: DispatchConfig | None = None,
        stream: Any,
    ) -> None:
        queue, config = self._usable(stream), config or DispatchConfig()
        require(layout_info is None, "dispatch: layout_info was given at create or update")  # 1.4 rule
        require(config.send_only == 0, "send_only is for low latency")  # 1.4 streams
        require(config.quantization_recipe == 0, "double: quantized transport is not modelled")
        require(outputs.topk_idx is None, "EXPERT_MAJOR has no topk_idx output")
        if not self.group.limit:
            queue.synchronize()  # 1.4 eager: dispatch also syncs internally
        x, out = _input(inputs.tokens, "dispatch tokens"), _output(outputs.tokens, "dispatch outputs.tokens")
        self._check_rows(x, self.num_tokens, "dispatch tokens")
        require(out.dtype == x.dtype and out.shape[1:] == x.shape[1:], "outputs.tokens: like the inputs")
        weights = row_weights = None
        if config.pass_direction == PassDir.FWD:
            weights = _input(inputs.topk_weights, "dispatch topk_weights")  # mandatory in FWD
            require(weights.dtype == torch.float32, "topk_weights: fp32")
            require(tuple(weights.shape) == (self.num_tokens, self.top_k), "topk_weights: [T, K]")
            row_weights = _output(outputs.topk_weights, "dispatch outputs.topk_weights")
            require(row_weights.dtype == torch.float32 and len(row_weights.shape) == 1, "[P] fp32, 1-D")
            self._check_size(row_weights, "outputs.topk_weights")
        else:
            # 1.4 backward pairing: no weights in or out
            require(
                inputs.topk_weights is None and outputs.topk_weights is None, "BWD dispatch has no weights"
            )
        self._check_size(out, "outputs.tokens")
        call = ["dispatch", self.index, int(config.pass_direction)]
        queue.enqueue(lambda: self._run_dispatch(call, x, weights, out, row_weights))

    def _run_dispatch(
        self, call: list[Any], x: Pointer, weights: Pointer | None, out: Pointer, row_weights: Pointer | None
    ) -> None:
        def check() -> None:
            self._ids_alive()
            self._fits()
            for pointer in (x, weights, out, row_weights):
                if pointer is not None:
                    pointer.check()

        sent = together(self.group.comm.group, call, None, check=check)
        sent = together(
            self.group.comm.group, call, (x.get().clone(), None if weights is None else weights.get().clone())
        )
        assert self.placement is not None
        limit = self.group.limit or self.placement.needed
        for pointer, which in ((out, 0), (row_weights, 1)):
            if pointer is None:
                continue
            target = pointer.get()
            if self.group.limit and self.group.drops:
                target[:limit] = 0  # 1.4 DROP: the first P output rows are memset each dispatch
            # rows between a zone's true count and its aligned end are zero, tokens and weights, FWD and BWD
            target[[slot for slot in self.placement.pads() if slot < limit]] = 0
            kept = [row for row in self._rows() if (row.source, row.token) not in self.flat_lost]
            fill(target, kept, [theirs[which] for theirs in sent], by_route=which == 1)

    def combine(
        self,
        inputs: CombineInputs,
        outputs: CombineOutputs,
        *,
        config: CombineConfig | None = None,
        stream: Any,
    ) -> None:
        queue, config = self._usable(stream), config or CombineConfig()
        require(config.send_only == 0, "send_only is for low latency")
        require(config.quantization_recipe == 0, "double: quantized transport is not modelled")
        x, out = _input(inputs.tokens, "combine tokens"), _output(outputs.tokens, "combine outputs.tokens")
        self._check_size(x, "combine tokens")
        require(x.dtype in ROW_DTYPES and out.dtype == x.dtype, "combine: bf16, fp16 or fp32")
        # outputs.tokens [T,H] with exactly the handle's T rows
        self._check_rows(out, self.num_tokens, "combine outputs.tokens")
        row_weights = weights = None
        if config.pass_direction == PassDir.FWD:
            # rejected in FWD; rows come already multiplied
            require(inputs.topk_weights is None, "FWD combine rejects inputs.topk_weights")
            require(outputs.topk_weights is None, "FWD combine has no weights out")
        else:
            # 1.4 backward pairing: both weight tensors are mandatory
            row_weights = _input(inputs.topk_weights, "BWD combine inputs.topk_weights")
            weights = _output(outputs.topk_weights, "BWD combine outputs.topk_weights")
            require(row_weights.dtype == weights.dtype == torch.float32, "topk_weights: fp32")
            require(len(row_weights.shape) == 1, "row weights: [P]")
            require(tuple(weights.shape) == (self.num_tokens, self.top_k), "topk_weights out: [T, K]")
            self._check_size(row_weights, "inputs.topk_weights")
        call = ["combine", self.index, int(config.pass_direction)]
        queue.enqueue(lambda: self._run_combine(call, x, row_weights, out, weights))

    def _run_combine(
        self, call: list[Any], x: Pointer, row_weights: Pointer | None, out: Pointer, weights: Pointer | None
    ) -> None:
        def check() -> None:
            self._ids_alive()
            for pointer in (x, row_weights, out, weights):
                if pointer is not None:
                    pointer.check()

        numbers = None if row_weights is None else row_weights.get
        routes = send_back(self.group.comm.group, call, self._rows(), x.get, numbers, check=check)
        sum_rows(out.get(), routes)  # HT never multiplies; all routes dropped: zero
        if weights is not None:
            assert self.routing is not None
            target = weights.get()
            # A dropped route contributes nothing. Nothing is said of -1 routes, so they stay uninitialised.
            target[self.routing.get() >= 0] = 0
            for row, _, number in routes:
                target[row.token, row.k] = number

    def _check_rows(self, pointer: Pointer, num_rows: int, name: str) -> None:
        require(pointer.dtype in ROW_DTYPES, f"{name}: bf16, fp16 or fp32")
        require(len(pointer.shape) == 2 and pointer.shape[0] == num_rows, f"{name}: exactly {num_rows} rows")
        row_bytes = pointer.shape[1] * pointer.dtype.itemsize
        require(row_bytes % 16 == 0, "H x itemsize % 16")
        require(row_bytes <= self.group.config.max_token_bytes, "row larger than max_token_bytes")

    def complete(self, *, config: int = 0, stream: Any) -> None:
        """No-op for HT."""
        self._usable(stream)

    def destroy(self) -> None:
        require(self.alive, "handle destroyed twice", TeardownOrder)
        require(self.group.alive, "group destroyed before its handle", TeardownOrder)
        self._ids_alive()
        self.alive = False
        self.group.handles -= 1
        self.group.comm.library.died("handle")


PUBLIC = (
    "Algorithm",
    "Layout",
    "PassDir",
    "OverflowPolicy",
    "ZeroCopyMode",
    "ExpertIdKind",
    "Tensor",
    "LayoutInfo",
    "GroupConfig",
    "HandleConfig",
    "AllocConfig",
    "DispatchConfig",
    "CombineConfig",
    "DispatchInputs",
    "DispatchOutputs",
    "CombineInputs",
    "CombineOutputs",
    "DispatchQuantizationRecipe",
    "CombineQuantizationRecipe",
)


class NcclEP:
    """The module. `log` has "+comm", "+group", "+handle", "-handle", ... in the order of events."""

    def __init__(self) -> None:
        self.log: list[str] = []
        for name in PUBLIC:
            setattr(self, name, getattr(types, name))
        self.Group, self.Handle = Group, Handle
        self.interop = SimpleNamespace(
            torch=SimpleNamespace(get_nccl_comm_from_group=lambda group: Comm(self, group))
        )

    def born(self, what: str) -> None:
        self.log.append(f"+{what}")

    def died(self, what: str) -> None:
        self.log.append(f"-{what}")

    def check_closed(self) -> None:
        """Raises TeardownOrder if anything is alive."""
        for what in ("handle", "group", "comm"):
            alive = self.log.count(f"+{what}") - self.log.count(f"-{what}")
            require(alive == 0, f"{alive} {what} never destroyed", TeardownOrder)
