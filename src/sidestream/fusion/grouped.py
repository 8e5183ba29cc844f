"""`fusion=grouped`: all local experts in one grouped GEMM per projection; no host read.

Legend: S slots, H features, F expert width, L local experts.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sidestream.dispatch.base import Received
from sidestream.fusion.base import gated_activation

# The grouped GEMM leaves output and input-gradient rows past the last offset uninitialised (case b3). Everything
# between the two GEMMs works row by row, so what lies there stays there; it is zeroed where rows leave and enter.
# Selection, not multiplication: it may be NaN.


def _zero_tail_(rows: Tensor, num_rows: Tensor, certain: int) -> Tensor:
    """Zero the rows at and past `num_rows` in place; the first `certain` are known to be before it."""
    index = torch.arange(certain, rows.shape[0], device=rows.device)
    outside = (index >= num_rows).view(-1, *[1] * (rows.dim() - 1))
    rows[certain:].masked_fill_(outside, 0)
    return rows


class _ZeroTailOfGradient(torch.autograd.Function):
    """Identity; the gradient that comes back has a zero tail."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, num_rows: Tensor, certain: int) -> Tensor:
        ctx.save_for_backward(num_rows)
        ctx.certain = certain
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        # Both gradients are fresh buffers of the operators behind this one, so they may be changed in place.
        return _zero_tail_(grad, ctx.saved_tensors[0], ctx.certain), None, None


class _ZeroTailOfOutput(torch.autograd.Function):
    """Zeroes the tail of a fresh buffer; the gradient of the tail is not looked at by the grouped GEMM."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, num_rows: Tensor, certain: int) -> Tensor:
        ctx.mark_dirty(rows)
        return _zero_tail_(rows, num_rows, certain)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad, None, None


class _GroupedMatmul(torch.autograd.Function):
    """`grouped_mm` whose backward accepts any gradient layout: the CPU kernel insists on contiguous operands."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, offsets)
        return F.grouped_mm(rows, weight, offs=offsets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        rows, weight, offsets = ctx.saved_tensors
        grad = grad.contiguous()
        grad_rows = F.grouped_mm(grad, weight.transpose(1, 2), offs=offsets)
        grad_weight = F.grouped_mm(rows.t(), grad, offs=offsets)
        return grad_rows, grad_weight, None


class GroupedExperts:
    """Two grouped GEMMs. The number of operators does not grow with the number of experts.

    On CUDA torch has the grouped kernel for bf16 on compute capability 9 and 10; elsewhere it falls back to a loop
    that reads the offsets on the host (read in torch's source, not run here).
    """

    name = "grouped"

    def __init__(self, *, alignment: int | Literal["auto"] = "auto") -> None:
        self.alignment: int | Literal["auto"] = alignment

    def __call__(self, received: Received, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
        rows, weights, offsets = received.rows, received.row_weights, received.offsets
        if rows.shape[0] == 0:
            # Keeps an idle rank attached to the graph: its experts get zero gradients, and the reverse exchanges
            # of rows and of weights start, as the other ranks expect (case b1).
            return rows * weights.unsqueeze(-1).to(rows.dtype) + 0.0 * (w_gate_up.sum() + w_down.sum())
        if received.exact:  # no tail
            gate_up = _GroupedMatmul.apply(rows, w_gate_up, offsets)
            return _GroupedMatmul.apply(gated_activation(gate_up, weights), w_down, offsets)
        tail = (offsets[-1], received.certain)
        rows, weights = _ZeroTailOfGradient.apply(rows, *tail), _ZeroTailOfGradient.apply(weights, *tail)
        gate_up = _GroupedMatmul.apply(rows, w_gate_up, offsets)
        out = _GroupedMatmul.apply(gated_activation(gate_up, weights), w_down, offsets)
        return _ZeroTailOfOutput.apply(out, *tail)
