"""Expert-major order: the index arithmetic every dispatcher shares, and the gathers that use it.

No host reads, and the number of operators does not depend on the number of experts or of routes.

    rows (any order) --expert_layout--> slots: expert 0's rows, padding, expert 1's rows, padding, ..., tail

A gather reads index -1 as a zero row. Every gather here is injective on the rows it reads or is the adjoint of one
that is, so forward and backward are both plain gathers: no scatter, no atomic sum, the same order every time.

Legend: N rows in, S slots, L experts in the layout, T tokens, K routes per token, H features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Layout:
    """Where each row goes.

    Attributes:
        row_of_slot: `[S]` int64, the row in each slot, -1 for padding and tail.
        slot_of_row: `[N]` int64, the slot of each row, -1 for rows that have no expert.
        counts: `[L]` int64, rows per expert without padding.
        offsets: `[L]` int32, inclusive ends of the padded segments.
        every_slot: No slot is -1 in `row_of_slot`: known without looking, when nothing is padded.
        every_row: No row is -1 in `slot_of_row`: known when every route has an expert.
    """

    row_of_slot: Tensor
    slot_of_row: Tensor
    counts: Tensor
    offsets: Tensor
    every_slot: bool = False
    every_row: bool = False

    def trim(self, num_slots: int) -> Layout:
        """Without the tail: the first `num_slots` slots, which all hold a row."""
        return replace(self, row_of_slot=self.row_of_slot[:num_slots], every_slot=True)


def max_slots(num_rows: int, *, num_experts: int, alignment: int) -> int:
    """Upper bound of the slots that `num_rows` rows need; depends on the total, not on the imbalance."""
    return num_rows + min(num_experts, num_rows) * (alignment - 1)


def expert_layout(
    expert_ids: Tensor, *, num_experts: int, alignment: int, num_slots: int, complete: bool = False
) -> Layout:
    """Sort rows by expert (stable), pad each expert's segment to a multiple of `alignment`.

    Args:
        expert_ids: `[N]` int64 in `-1..num_experts-1`; -1 rows get no slot.
        num_experts: L.
        alignment: Rows per segment are rounded up to a multiple.
        num_slots: S, at least the padded total.
        complete: Promise that no id is -1.
    """
    device, num_rows = expert_ids.device, expert_ids.numel()
    key = torch.where(expert_ids < 0, num_experts, expert_ids)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device).scatter_add_(
        0, key, torch.ones_like(key)
    )
    padded = torch.div(counts + (alignment - 1), alignment, rounding_mode="floor") * alignment
    ends, begins = counts.cumsum(0), padded.cumsum(0)
    # Slot of the i-th row in sorted order = i + how far its segment was shifted by padding before it.
    shift = (begins - padded) - (ends - counts)
    order = torch.argsort(key, stable=True)
    sorted_key = key.index_select(0, order)
    slot = torch.arange(num_rows, device=device) + shift.index_select(0, sorted_key)
    has_expert = sorted_key < num_experts
    # One extra slot takes the rows without an expert; it is cut off again.
    row_of_slot = torch.full((num_slots + 1,), -1, dtype=torch.int64, device=device)
    row_of_slot.scatter_(0, torch.where(has_expert, slot, num_slots), order)
    slot_of_row = torch.empty_like(order).scatter_(0, order, torch.where(has_expert, slot, -1))
    return Layout(
        row_of_slot[:num_slots],
        slot_of_row,
        counts[:num_experts],
        begins[:num_experts].to(torch.int32),
        every_slot=complete and alignment == 1 and num_slots == num_rows,
        every_row=complete,
    )


def _gather(x: Tensor, index: Tensor, every: bool) -> Tensor:
    """Rows of `x` at `index`; -1 reads a zero row. Selection, not multiplication: NaN times zero is NaN."""
    if every:
        return x.index_select(0, index)
    zero = x.new_zeros((1, *x.shape[1:]))
    return torch.cat([x, zero]).index_select(0, torch.where(index < 0, x.shape[0], index))


def _sum_routes(rows: Tensor, slot_of_route: Tensor, every: bool) -> Tensor:
    """`[S, H]` -> `[T, H]`: the K rows of each token, summed in fp32 in the order of K and rounded once.

    `embedding_bag` gathers and sums in one pass (20 times faster on a CPU than gather, then sum).
    """
    if not every:
        rows = torch.cat([rows, rows.new_zeros((1, rows.shape[1]))])
        slot_of_route = torch.where(slot_of_route < 0, rows.shape[0] - 1, slot_of_route)
    return F.embedding_bag(slot_of_route, rows, mode="sum")


class _Permute(torch.autograd.Function):
    """A gather of rows whose backward is a gather by the inverse."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, every: bool, every_inverse: bool
    ) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.every = every_inverse
        return _gather(x, index, every)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        return _gather(grad, inverse, ctx.every), None, None, None, None


def rows_to_slots(x: Tensor, layout: Layout) -> Tensor:
    """`[N, ...]` rows -> `[S, ...]` slots; empty slots are zero. Differentiable."""
    return _Permute.apply(x, layout.row_of_slot, layout.slot_of_row, layout.every_slot, layout.every_row)


def slots_to_rows(x: Tensor, layout: Layout) -> Tensor:
    """`[S, ...]` slots -> `[N, ...]` rows; rows without a slot are zero. Differentiable."""
    return _Permute.apply(x, layout.slot_of_row, layout.row_of_slot, layout.every_row, layout.every_slot)


class _TokensToSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, top_k: int) -> Tensor:
        ctx.layout, ctx.top_k = layout, top_k
        return _gather(x, _token_of_slot(layout, top_k), layout.every_slot)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        layout = ctx.layout
        return _sum_routes(grad, layout.slot_of_row.view(-1, ctx.top_k), layout.every_row), None, None


class _SumRoutes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, layout: Layout, top_k: int) -> Tensor:
        ctx.layout, ctx.top_k = layout, top_k
        return _sum_routes(rows, layout.slot_of_row.view(-1, top_k), layout.every_row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _gather(grad, _token_of_slot(ctx.layout, ctx.top_k), ctx.layout.every_slot), None, None


def _token_of_slot(layout: Layout, top_k: int) -> Tensor:
    # floor division keeps -1 at -1
    return torch.div(layout.row_of_slot, top_k, rounding_mode="floor")


def tokens_to_slots(x: Tensor, layout: Layout, *, top_k: int) -> Tensor:
    """Copy each token to the slots of its routes; the gradient is the fp32 sum over a token's routes.

    Args:
        x: `[T, H]`.
        layout: Of the `T * top_k` routes, token-major.
        top_k: K.

    Returns:
        `[S, H]`; empty slots are zero.
    """
    return _TokensToSlots.apply(x, layout, top_k)


def sum_routes(rows: Tensor, layout: Layout, *, top_k: int) -> Tensor:
    """Sum the K rows of each token in fp32: `[S, H]` -> `[T, H]` in the dtype of `rows`. Adjoint of the above."""
    return _SumRoutes.apply(rows, layout, top_k)
