"""Expert-major order: the index arithmetic every dispatcher shares, and the gathers that use it.

No host reads, and the number of operators does not depend on the number of experts or of routes.

    rows (any order) --expert_layout--> slots: expert 0's rows, padding, expert 1's rows, padding, ..., tail

A gather reads index -1 as a zero row. Every gather here is injective on the rows it reads or is the adjoint of one
that is, so forward and backward are both plain gathers: no scatter, no atomic sum, the same order every time.

Legend: N rows in, S slots, L experts in the layout, T tokens, K routes per token, H features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
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
    """

    row_of_slot: Tensor
    slot_of_row: Tensor
    counts: Tensor
    offsets: Tensor


def max_slots(num_rows: int, *, num_experts: int, alignment: int) -> int:
    """Upper bound of the slots that `num_rows` rows need; depends on the total, not on the imbalance."""
    return num_rows + min(num_experts, num_rows) * (alignment - 1)


def expert_layout(expert_ids: Tensor, *, num_experts: int, alignment: int, num_slots: int) -> Layout:
    """Sort rows by expert (stable), pad each expert's segment to a multiple of `alignment`.

    Args:
        expert_ids: `[N]` int64 in `-1..num_experts-1`; -1 rows get no slot.
        num_experts: L.
        alignment: Rows per segment are rounded up to a multiple.
        num_slots: S, at least the padded total.
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
        row_of_slot[:num_slots], slot_of_row, counts[:num_experts], begins[:num_experts].to(torch.int32)
    )


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """Rows of `x` at `index`; -1 reads a zero row. Selection, not multiplication: NaN times zero is NaN."""
    zero = x.new_zeros((1, *x.shape[1:]))
    return torch.cat([x, zero]).index_select(0, torch.where(index < 0, x.shape[0], index))


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return _gather(x, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        return _gather(grad, inverse), None, None


def gather_rows(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """Permute rows, differentiably.

    Args:
        x: `[N, ...]`.
        index: `[S]` int64, row of `x` for each output row; -1 gives zeros. Each row of `x` occurs at most once.
        inverse: `[N]` int64, output row of each row of `x`, -1 if it is not read.
    """
    return _GatherRows.apply(x, index, inverse)


class _Unpack(torch.autograd.Function):
    """`[T, H]` -> `[S, H]`: slot s gets the token of its route. Adjoint of `_SumRoutes`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, route_of_slot: Tensor, slot_of_route: Tensor) -> Tensor:
        ctx.save_for_backward(slot_of_route)
        return _gather(x, _token(route_of_slot, slot_of_route.shape[1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (slot_of_route,) = ctx.saved_tensors
        return _sum_routes(grad, slot_of_route), None, None


class _SumRoutes(torch.autograd.Function):
    """`[S, H]` -> `[T, H]`: sum of a token's K rows in fp32. Adjoint of `_Unpack`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route_of_slot: Tensor, slot_of_route: Tensor) -> Tensor:
        ctx.save_for_backward(route_of_slot)
        ctx.top_k = slot_of_route.shape[1]
        return _sum_routes(rows, slot_of_route)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (route_of_slot,) = ctx.saved_tensors
        return _gather(grad, _token(route_of_slot, ctx.top_k)), None, None


def _token(route_of_slot: Tensor, top_k: int) -> Tensor:
    # floor division keeps -1 at -1
    return torch.div(route_of_slot, top_k, rounding_mode="floor")


def _sum_routes(rows: Tensor, slot_of_route: Tensor) -> Tensor:
    num_tokens, top_k = slot_of_route.shape
    picked = _gather(rows, slot_of_route.reshape(-1)).view(num_tokens, top_k, *rows.shape[1:])
    return picked.sum(dim=1, dtype=torch.float32).to(rows.dtype)


def unpack_tokens(x: Tensor, route_of_slot: Tensor, slot_of_route: Tensor) -> Tensor:
    """Copy each token to the slots of its routes; the gradient is the fp32 sum over a token's routes.

    Args:
        x: `[T, H]`.
        route_of_slot: `[S]` int64 in `-1..T*K-1`; -1 gives a zero row.
        slot_of_route: `[T, K]` int64 in `-1..S-1`, its inverse.
    """
    return _Unpack.apply(x, route_of_slot, slot_of_route)


def sum_routes(rows: Tensor, route_of_slot: Tensor, slot_of_route: Tensor) -> Tensor:
    """Sum the K rows of each token in fp32, in the order of K. `[S, H]` -> `[T, H]` in the dtype of `rows`."""
    return _SumRoutes.apply(rows, route_of_slot, slot_of_route)
