"""Expert-major order: the index arithmetic every dispatcher shares, and the gathers that use it.

No host reads, and the number of operators does not depend on the number of experts or of routes, but for sums of
bf16 on a CPU.

    rows (any order) --expert_layout--> slots: expert 0's rows, padding, expert 1's rows, padding, ..., tail

The same order serves twice: rows that leave are sorted by destination rank, rows that arrived by local expert.

Every gather here is injective on the rows it reads or is the adjoint of one that is, so forward and backward are both
plain gathers: no scatter, no atomic sum, the same order every time. The tail is never read in either direction, so
what lies there may be anything.

Legend: N rows in, S slots, L experts in the layout, T tokens, K routes per token, H features.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class RowLayout:
    """Where each row goes.

    Attributes:
        row_of_slot: `[S]` int64, the row in each slot, -1 for padding and tail.
        slot_of_row: `[N]` int64, the slot of each row, -1 for rows that have no expert or found no room.
        counts: `[L]` int64, rows per expert without padding, before any is dropped.
        offsets: `[L]` int32, inclusive ends of the padded segments, cut at S.
        needed: int64 scalar, slots needed before any row is dropped.
        holes: Slots that are padding inside a segment, in any order, filled up with S; None if there are none.
        every_slot: No slot is -1 in `row_of_slot`: known without looking, when nothing is padded.
        every_row: No row is -1 in `slot_of_row`: known when every route has an expert and there is room.
        num_rows: Rows that have a slot, where the host knows it.
    """

    row_of_slot: Tensor
    slot_of_row: Tensor
    counts: Tensor
    offsets: Tensor
    needed: Tensor
    holes: Tensor | None = None
    every_slot: bool = False
    every_row: bool = False
    num_rows: int | None = None
    _bags: dict[int, tuple[Tensor, Tensor | None]] = field(default_factory=dict, repr=False, compare=False)

    def trim(self, num_slots: int) -> RowLayout:
        """Without the tail, in a layout without padding: the first `num_slots` slots, which all hold a row."""
        return replace(
            self, row_of_slot=self.row_of_slot[:num_slots], every_slot=True, num_rows=num_slots, _bags={}
        )

    def bags(self, top_k: int) -> tuple[Tensor, Tensor | None]:
        """Slots of each token's routes, as `embedding_bag` takes them: an index and where each token's begins.

        Routes without a slot are left out. Where the host does not know how many these are, the index keeps its
        full length and one more bag takes what is left of it.
        """
        if top_k not in self._bags:
            self._bags[top_k] = self._make_bags(top_k)
        return self._bags[top_k]

    def _make_bags(self, top_k: int) -> tuple[Tensor, Tensor | None]:
        slots, total = self.slot_of_row, self.slot_of_row.numel()
        if self.every_row:
            return slots.view(-1, top_k), None
        real = slots >= 0
        position = torch.where(real, real.cumsum(0) - 1, total)
        index = slots.new_zeros(total + 1).scatter_(0, position, slots)
        ends = F.pad(real.view(-1, top_k).sum(1).cumsum(0), (1, 0))
        if self.num_rows is not None:
            return index[: self.num_rows], ends
        return index[:total], F.pad(ends, (0, 1), value=total)


def max_slots(num_rows: int, *, num_experts: int, alignment: int) -> int:
    """Upper bound of the slots that `num_rows` rows need; depends on the total, not on the imbalance."""
    return num_rows + min(num_experts, num_rows) * (alignment - 1)


def expert_layout(
    expert_ids: Tensor,
    *,
    num_experts: int,
    alignment: int = 1,
    num_slots: int,
    complete: bool = False,
    num_rows: int | None = None,
    segment: int | None = None,
    may_overflow: bool = False,
) -> RowLayout:
    """Sort rows by expert (stable), pad each expert's segment to a multiple of `alignment`.

    Args:
        expert_ids: `[N]` int64 in `-1..num_experts-1`; -1 rows get no slot.
        num_experts: L.
        alignment: Rows per segment are rounded up to a multiple.
        num_slots: S, at least the padded total unless `may_overflow`.
        complete: Promise that no id is -1.
        num_rows: Rows with an expert, where the host knows it.
        segment: Every segment has exactly this many slots, whatever it holds; `alignment` does not apply.
        may_overflow: The buffer may be too small; the rows past it are dropped, which hits the last experts first
            and in each of them the last rows.
    """
    device, total = expert_ids.device, expert_ids.numel()
    key = torch.where(expert_ids < 0, num_experts, expert_ids)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device).scatter_add_(
        0, key, torch.ones_like(key)
    )
    if segment is not None:
        padded = torch.full_like(counts, segment)
    else:
        padded = torch.div(counts + (alignment - 1), alignment, rounding_mode="floor") * alignment
    ends, begins = counts.cumsum(0), padded.cumsum(0)
    # Slot of the i-th row in sorted order = i + how far its segment was shifted by padding before it.
    shift = (begins - padded) - (ends - counts)
    # Short keys sort faster.
    order = torch.argsort(key.to(torch.int16) if num_experts < 2**15 else key, stable=True)
    sorted_key = key.index_select(0, order)
    slot = torch.arange(total, device=device) + shift.index_select(0, sorted_key)
    has_slot = sorted_key < num_experts
    if may_overflow:
        has_slot = has_slot & (slot < num_slots)
    # One extra slot takes the rows without an expert; it is cut off again.
    row_of_slot = torch.full((num_slots + 1,), -1, dtype=torch.int64, device=device)
    row_of_slot.scatter_(0, torch.where(has_slot, slot, num_slots), order)
    slot_of_row = torch.empty_like(order).scatter_(0, order, torch.where(has_slot, slot, -1))
    offsets = begins[:num_experts]
    return RowLayout(
        row_of_slot[:num_slots],
        slot_of_row,
        counts[:num_experts],
        (offsets.clamp(max=num_slots) if may_overflow else offsets).to(torch.int32),
        offsets[-1],
        holes=_holes(offsets, padded, counts, alignment, num_slots)
        if alignment > 1 and not segment
        else None,
        every_slot=complete and alignment == 1 and num_slots == total and not segment,
        every_row=complete and not may_overflow,
        num_rows=num_rows,
    )


def _holes(offsets: Tensor, padded: Tensor, counts: Tensor, alignment: int, num_slots: int) -> Tensor:
    """`[L * (alignment - 1)]`, see `RowLayout.holes`."""
    num_experts = offsets.numel()
    first = (offsets - padded[:num_experts] + counts[:num_experts]).unsqueeze(1)
    slot = first + torch.arange(alignment - 1, device=offsets.device)
    inside = (slot < offsets.unsqueeze(1)) & (slot < num_slots)
    return torch.where(inside, slot, num_slots).view(-1)


def _fill_slots(x: Tensor, row_of_slot: Tensor, layout: RowLayout) -> Tensor:
    """Rows of `x` at `row_of_slot` `[S]`; padding inside a segment is zero, the tail is whatever it is."""
    num_slots = row_of_slot.numel()
    if x.shape[0] == 0:
        return x.new_zeros((num_slots, *x.shape[1:]))
    if layout.every_slot:
        return x.index_select(0, row_of_slot)
    index = row_of_slot.clamp(min=0)
    if layout.holes is None:
        return x.index_select(0, index)
    # One row more than needed: where the list of holes is filled up.
    out = x.new_empty((num_slots + 1, *x.shape[1:]))
    torch.index_select(x, 0, index, out=out[:num_slots])
    out.index_fill_(0, layout.holes, 0)
    return out[:num_slots]


def _take_rows(slots: Tensor, layout: RowLayout) -> Tensor:
    """`[S, ...]` -> `[N, ...]`; rows without a slot are zero. By selection: NaN times zero is NaN."""
    index = layout.slot_of_row
    if layout.every_row:
        return slots.index_select(0, index)
    if slots.shape[0] == 0:
        return slots.new_zeros((index.numel(), *slots.shape[1:]))
    missing = (index < 0).view(-1, *[1] * (slots.dim() - 1))
    return slots.index_select(0, index.clamp(min=0)).masked_fill_(missing, 0)


def _sum_slots(slots: Tensor, layout: RowLayout, top_k: int) -> Tensor:
    """`[S, H]` -> `[T, H]`: the rows of each token, summed in fp32 in the order of K and rounded once.

    `embedding_bag` gathers and sums in one pass (20 times faster on a CPU than gather, then sum).
    """
    num_tokens = layout.slot_of_row.numel() // top_k
    if slots.shape[0] == 0:
        return slots.new_zeros((num_tokens, slots.shape[1]))
    if top_k > 1 and rounds_half_up(slots):
        return sum_rows(slots, layout.slot_of_row.view(-1, top_k), complete=layout.every_row)
    index, begins = layout.bags(top_k)
    if begins is None:
        return F.embedding_bag(index, slots, mode="sum")
    return F.embedding_bag(index, slots, begins, mode="sum", include_last_offset=True)[:num_tokens]


def rounds_half_up(rows: Tensor) -> bool:
    """`embedding_bag` rounds a sum that lies between two numbers away from zero: for bf16 on a CPU."""
    return rows.dtype == torch.bfloat16 and rows.device.type == "cpu"


# Elements of a block of sums: they stay in the core's cache from one addition to the next.
_BLOCK = 2**18


def sum_rows(rows: Tensor, index: Tensor, *, complete: bool) -> Tensor:
    """Sums of rows in fp32, in the order of the index, rounded once to the nearest, ties to even. No gradient.

    Args:
        rows: `[S, H]`, at least one row.
        index: `[T, K]` int64, -1 for no row.
        complete: Promise that no index is -1.

    Returns:
        `[T, H]` in the dtype of `rows`.
    """
    num_sums, hidden = index.shape[0], rows.shape[1]
    out, of_step = rows.new_empty((num_sums, hidden)), index.t().contiguous()
    for begin in range(0, num_sums, max(1, _BLOCK // hidden)):
        block = slice(begin, begin + max(1, _BLOCK // hidden))
        total: Tensor | None = None
        for step in of_step[:, block]:
            row = rows.index_select(0, step if complete else step.clamp(min=0))
            if not complete:  # by selection: a row that is not there may hold anything
                row.masked_fill_((step < 0).unsqueeze(1), 0)
            total = row.float() if total is None else total.add_(row)
        assert total is not None, "K is at least 1"
        out[block] = total
    return out


class _RowsToSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: RowLayout) -> Tensor:
        ctx.layout = layout
        return _fill_slots(x, layout.row_of_slot, layout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _take_rows(grad, ctx.layout), None


class _TokensToSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: RowLayout, top_k: int) -> Tensor:
        ctx.layout, ctx.top_k = layout, top_k
        return _fill_slots(x, _token_of_slot(layout, top_k), layout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _sum_slots(grad, ctx.layout, ctx.top_k), None, None


class _SumRoutes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slots: Tensor, layout: RowLayout, top_k: int) -> Tensor:
        ctx.layout, ctx.top_k = layout, top_k
        return _sum_slots(slots, layout, top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _fill_slots(grad, _token_of_slot(ctx.layout, ctx.top_k), ctx.layout), None, None


def _token_of_slot(layout: RowLayout, top_k: int) -> Tensor:
    # floor division keeps -1 at -1
    return layout.row_of_slot if top_k == 1 else torch.div(layout.row_of_slot, top_k, rounding_mode="floor")


def rows_to_slots(x: Tensor, layout: RowLayout) -> Tensor:
    """`[N, ...]` rows -> `[S, ...]` slots; padding is zero, the tail undefined. Differentiable."""
    return _RowsToSlots.apply(x, layout)


def tokens_to_slots(x: Tensor, layout: RowLayout, *, top_k: int) -> Tensor:
    """Copy each token to the slots of its routes; the gradient is the fp32 sum over a token's routes.

    Args:
        x: `[T, H]`.
        layout: Where the `T * top_k` routes go, token-major.
        top_k: K.

    Returns:
        `[S, H]`; padding is zero, the tail undefined.
    """
    return _TokensToSlots.apply(x, layout, top_k)


def sum_routes(rows: Tensor, layout: RowLayout, *, top_k: int) -> Tensor:
    """Sum the K rows of each token in fp32: `[S, H]` -> `[T, H]` in the dtype of `rows`. Adjoint of the above."""
    return _SumRoutes.apply(rows, layout, top_k)
