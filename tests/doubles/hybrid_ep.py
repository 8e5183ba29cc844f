"""A double of `deep_ep` on its `hybrid-ep` branch at 94a9f8f: `HybridEPBuffer`.

It holds callers to what the library's documentation and source say.

    deep_ep = HybridEP()        # in place of the module
    buffer = deep_ep.HybridEPBuffer(group, hidden_dim=64, max_num_of_tokens_per_rank=64, num_local_experts=4)

Legend: T tokens, K routes per token, H features, E experts, R ranks, L local experts, P output rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.doubles.rules import (
    Corruption,
    Hang,
    Input,
    Placement,
    Row,
    TeardownOrder,
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

CHUNK = 128  # of tokens; any multiple of 64 gives the same checks for token counts that are multiples of 64


@dataclass(eq=False)
class _Routed:
    """First entry of the handle: what the other calls need. Opaque to callers."""

    index: int
    num_tokens: int
    num_experts: int
    rows: int
    pad_multiple: int
    fuse: bool
    non_blocking: bool
    map_TE: Tensor
    placement: Placement | None = None

    def kept(self) -> list[Row]:
        assert self.placement is not None
        return [row for row in self.placement.rows if row.slot < self.rows]


class HybridEPBuffer:
    """`library` is set by `HybridEP`. There is no destroy method: drop the reference."""

    library: HybridEP

    def __init__(
        self,
        group: dist.ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
    ) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        require(self.size >= 2, "group size >= 2")
        require(self.size <= 72, "at most 72 ranks per NVLink domain")
        require(hidden_dim % 16 == 0, "H % 16")
        require(num_local_experts * self.size % 4 == 0, "L x ranks per domain % 4")
        require(not use_fp8, "double: fp8 is not modelled")
        self.hidden, self.num_local = hidden_dim, num_local_experts
        self.max_tokens = max(512, max_num_of_tokens_per_rank)  # min buffer 512 tokens
        self.calls = self.grown = 0
        together(group, ["HybridEPBuffer", hidden_dim, max_num_of_tokens_per_rank, num_local_experts])
        self.library.log.append("+buffer")

    def __del__(self) -> None:
        if not hasattr(self, "grown"):
            return  # never finished
        try:
            dist.get_rank(self.group)
            self.library.log.append("-buffer")
        except (ValueError, RuntimeError):
            self.library.log.append("-buffer after its process group")

    # Forward dispatch, and cached dispatch for the gradient of combine.

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_permuted_tokens: int | None = None,
        pad_multiple: int | None = None,
        handle: tuple[Any, ...] | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
    ) -> tuple[Tensor, Tensor | None, None, Tensor, tuple[Any, ...]]:
        self._check_hidden(hidden)
        require(scaling_factor is None and not use_fp8, "double: fp8 is not modelled")
        multiple = pad_multiple or 1
        if non_blocking:
            # non_blocking requires num_permuted_tokens with P % pad_multiple == 0
            fits = num_permuted_tokens is not None and num_permuted_tokens % multiple == 0
            require(fits, "non_blocking requires num_permuted_tokens, a multiple of pad_multiple")
        cached = handle is not None
        if handle is not None:
            require(topk_idx is None and routing_map is None, "cached dispatch: the handle has the routing")
            self._check_flags(handle, multiple, fuse_permute_dispatch)
            require(
                num_permuted_tokens == handle[0].rows, "cached dispatch: num_permuted_tokens as in forward"
            )
            require(hidden.shape[0] == handle[0].num_tokens, "cached dispatch: tokens as in forward", Hang)
        else:
            routing_map, probs = self._dense(
                hidden, topk_idx, topk_weights, routing_map, probs, num_of_experts
            )
            handle = self._fresh(
                hidden, routing_map, num_permuted_tokens, multiple, non_blocking, fuse_permute_dispatch
            )
        routed: _Routed = handle[0]
        if not cached and not non_blocking:
            current_stream().synchronize()  # blocking mode does one stream sync per dispatch
            self._scan(handle, num_permuted_tokens)
        out = garbage(routed.rows, self.hidden, dtype=hidden.dtype)
        row_probs = None if probs is None else garbage(routed.rows, dtype=torch.float32)
        counts = garbage(self.num_local, dtype=torch.int64)  # not filled on a cached call
        x, numbers = Input(hidden, "hidden"), None if probs is None else Input(probs, "probs")

        def work() -> None:
            if routed.placement is None:
                self._scan(handle, num_permuted_tokens)
            if not cached:
                counts.copy_(torch.tensor(self._padded_counts(routed)))
            self._move(routed, ["dispatch", routed.index, cached], x, numbers, out, row_probs)

        current_stream().enqueue(work)
        if not non_blocking:
            current_stream().synchronize()
        return out, row_probs, None, counts, handle

    def _check_hidden(self, hidden: Tensor) -> None:
        # 2-byte types only
        require(hidden.dtype == torch.bfloat16, "hidden: bf16")
        require(hidden.dim() == 2 and hidden.shape[1] == self.hidden, "hidden: [T, H]")
        require(hidden.is_contiguous(), "hidden: contiguous")

    def _check_flags(self, handle: tuple[Any, ...], pad_multiple: int, fuse: bool) -> None:
        # same pad_multiple, fuse_* flags equal in all four calls
        routed: _Routed = handle[0]
        require(len(handle) == 11, "handle: tuple of 11")
        require(pad_multiple == routed.pad_multiple, "pad_multiple differs from the dispatch", Corruption)
        require(fuse == routed.fuse, "fuse flags differ between the four calls", Corruption)

    def _dense(
        self,
        hidden: Tensor,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        routing_map: Tensor | None,
        probs: Tensor | None,
        num_of_experts: int | None,
    ) -> tuple[Tensor, Tensor]:
        num_experts = self.num_local * self.size
        require(num_of_experts in (None, num_experts), "num_of_experts: local experts x ranks")
        if topk_idx is not None:
            require(
                topk_weights is not None and routing_map is None,
                "topk_idx with topk_weights, or map with probs",
            )
            assert topk_weights is not None
            # at 94a9f8f the scatter does not accept -1
            require(bool((topk_idx >= 0).all()), "topk_idx: -1 is out of bounds for scatter", DeviceIndex)
            empty = torch.zeros(hidden.shape[0], num_experts)
            return empty.bool().scatter(1, topk_idx, True), empty.scatter(1, topk_idx, topk_weights)
        require(routing_map is not None and probs is not None, "routing_map and probs")
        assert routing_map is not None and probs is not None
        shape = (hidden.shape[0], num_experts)
        require(
            routing_map.dtype == torch.bool and tuple(routing_map.shape) == shape, "routing_map: bool [T, E]"
        )
        require(probs.dtype == torch.float32 and tuple(probs.shape) == shape, "probs: fp32 [T, E]")
        require(routing_map.is_contiguous() and probs.is_contiguous(), "map and probs: contiguous")
        return routing_map, probs

    def _fresh(
        self, hidden: Tensor, map_TE: Tensor, limit: int | None, multiple: int, non_blocking: bool, fuse: bool
    ) -> tuple[Any, ...]:
        num_tokens = hidden.shape[0]
        # all ranks must pass the same number of tokens, else it hangs (#604)
        counts = together(
            self.group, ["dispatch_with_permute", multiple, limit, non_blocking, fuse], num_tokens
        )
        require(len(set(counts)) == 1, f"tokens per rank differ: {counts}", Hang)
        # (T % chunk) * ranks_per_node * 4 % 16 == 0, else it hangs (#561)
        require(num_tokens % CHUNK * self.size * 4 % 16 == 0, f"odd number of tokens {num_tokens}", Hang)
        if num_tokens > self.max_tokens:
            self.max_tokens, self.grown = num_tokens, self.grown + 1  # grows, slow and collective
        self.calls += 1
        num_experts = map_TE.shape[1]
        routed = _Routed(
            self.calls, num_tokens, num_experts, limit or 0, multiple, fuse, non_blocking, map_TE.clone()
        )
        counts_L = garbage(self.num_local, dtype=torch.int32)
        # in blocking mode the overflow flag is never written
        flag = garbage(1, dtype=torch.int32)
        # handle[7] raw counts, handle[8] tokens per rank, handle[-1] overflow flag
        return (routed, None, None, None, None, None, None, counts_L, num_tokens, None, flag)

    def _scan(self, handle: tuple[Any, ...], limit: int | None) -> None:
        """Exchange the maps and place the rows."""
        routed: _Routed = handle[0]
        maps = together(self.group, ["scan", routed.index], routed.map_TE)
        experts = torch.arange(routed.num_experts)
        # A dense map is a top-E routing whose k is the expert.
        p = place(
            [torch.where(theirs, experts, -1) for theirs in maps],
            rank=self.rank,
            num_local=self.num_local,
            alignment=routed.pad_multiple,
        )
        routed.placement = p
        if routed.non_blocking:
            handle[10].fill_(int(p.needed > routed.rows))  # one bit, no size
        else:
            routed.rows = p.needed if limit is None else limit
            # a too small P is not guarded in blocking mode
            require(
                p.needed <= routed.rows, f"{p.needed} rows written to a buffer of {routed.rows}", Corruption
            )
        kept = [sum(row.slot < routed.rows for row in zone) for zone in self._zones(p)]
        handle[7].copy_(torch.tensor(kept))  # post-drop

    def _zones(self, p: Placement) -> list[list[Row]]:
        return [[row for row in p.rows if begin <= row.slot < end] for begin, end in zip(p.begins, p.ends)]

    def _padded_counts(self, routed: _Routed) -> list[int]:
        """`tokens_per_expert` counts padding, and what is left after dropping."""
        p, limit = routed.placement, routed.rows
        assert p is not None
        return [min(end, limit) - min(begin, limit) for begin, end in zip(p.begins, p.ends)]

    def _move(
        self,
        routed: _Routed,
        call: list[Any],
        x: Input,
        probs: Input | None,
        out: Tensor,
        row_probs: Tensor | None,
    ) -> None:
        def check() -> None:
            x.check()
            if probs is not None:
                probs.check()

        sent = together(self.group, call, (x.get(), None if probs is None else probs.get()), check=check)
        assert routed.placement is not None
        # padding rows inside each zone are zeroed in every dispatch; rows after the last zone are not written
        pads = [slot for slot in routed.placement.pads() if slot < routed.rows]
        out[pads] = 0
        fill(out, routed.kept(), [theirs[0] for theirs in sent])
        if row_probs is not None:
            row_probs[pads] = 0
            fill(row_probs, routed.kept(), [theirs[1] for theirs in sent], by_route=True)

    # Combine, and the gradient of dispatch.

    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: tuple[Any, ...],
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        self._check_hidden(hidden)
        self._check_flags(handle, pad_multiple or 1, fuse_unpermute_combine)
        routed: _Routed = handle[0]
        require(
            hidden.shape[0] == routed.rows, f"combine: {hidden.shape[0]} rows, the handle has {routed.rows}"
        )
        x, numbers, dense = Input(hidden, "combine hidden"), None, None
        if probs is not None:
            require(probs.dtype == torch.float32 and tuple(probs.shape) == (routed.rows,), "probs: [P] fp32")
            require(probs.is_contiguous(), "probs: contiguous")
            numbers = Input(probs, "combine probs")
            dense = garbage(routed.num_tokens, routed.num_experts, dtype=torch.float32)
        out = garbage(routed.num_tokens, self.hidden, dtype=hidden.dtype)

        def work() -> None:
            def check() -> None:
                x.check()
                if numbers is not None:
                    numbers.check()

            get = None if numbers is None else numbers.get
            call = ["combine", routed.index, numbers is not None]
            routes = send_back(self.group, call, routed.kept(), x.get, get, check=check)
            sum_rows(out, routes)  # bf16 rows summed in fp32, no weighting
            if dense is not None:
                # Dense gradients: a dropped route contributes nothing; nothing is said of entries without a route.
                garbage_(dense)[routed.map_TE] = 0
                for row, _, number in routes:
                    dense[row.token, row.k] = number

        current_stream().enqueue(work)
        return out, dense


class DeviceIndex(Corruption):
    """A scatter index out of bounds."""


class HybridEP:
    """The module, branch hybrid-ep: it has `HybridEPBuffer` and no `ElasticBuffer`."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.HybridEPBuffer = type("HybridEPBuffer", (HybridEPBuffer,), {"library": self})

    def check_closed(self) -> None:
        """Raises TeardownOrder if a buffer is still referenced, or outlived its process group."""
        require(
            self.log.count("+buffer") == self.log.count("-buffer"), f"buffers left: {self.log}", TeardownOrder
        )
