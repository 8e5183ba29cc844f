"""`fusion=grouped`: all local experts in one grouped GEMM per projection; no host read.

Legend: S slots, H features, F expert width, L local experts.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sidestream.dispatch.base import Received
from sidestream.fusion.base import gated_activation
from sidestream.fusion.late import Late

# The grouped GEMM leaves output and input-gradient rows past the last offset uninitialised. Everything
# between the two GEMMs works row by row, so what lies there stays there, and dispatchers read no such row.


def _grouped_mm(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """`F.grouped_mm` for any widths: its kernels want rows of whole 16 bytes, so others are filled up with zeros.

    Args:
        a: `[S, K]`, or `[K, S]` transposed from contiguous rows.
        b: `[L, K, N]` with either of the last two contiguous, or `[S, N]`.
        offsets: `[L]` int32.

    Returns:
        `[S, N]`, or `[L, K, N]`; contiguous.
    """
    unit = 16 // a.element_size()
    (rows, columns), weighs = a.shape, b.dim() == 3
    k, n = (columns if weighs else rows), b.shape[-1]
    if k % unit == 0 and n % unit == 0:
        return F.grouped_mm(a, b, offs=offsets)
    more_k, more_n = -k % unit, -n % unit
    if weighs:
        wide = F.grouped_mm(F.pad(a, (0, more_k)), F.pad(b, (0, more_n, 0, more_k)), offs=offsets)
        return wide[:, :n].contiguous()
    a, b = F.pad(a.t(), (0, more_k)).t(), F.pad(b, (0, more_n))
    return F.grouped_mm(a, b, offs=offsets)[:, :k, :n].contiguous()


class _GroupedMatmul(torch.autograd.Function):
    """`grouped_mm` whose backward accepts any gradient layout: the CPU kernel insists on contiguous operands."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, offsets: Tensor, late: Late | None = None) -> Tensor:
        ctx.save_for_backward(rows, weight, offsets)
        ctx.late = late
        return _grouped_mm(rows, weight, offsets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        rows, weight, offsets = ctx.saved_tensors
        grad = grad.contiguous()
        grad_rows = _grouped_mm(grad, weight.transpose(1, 2), offsets)
        if ctx.late is not None:
            put_off = ctx.late.put_off(lambda: _grouped_mm(rows.t(), grad, offsets), weight)
            return grad_rows, put_off, None, None
        return grad_rows, _grouped_mm(rows.t(), grad, offsets), None, None


class GroupedExperts:
    """Two grouped GEMMs. The number of operators does not grow with the number of experts.

    On CUDA torch has the grouped kernel for bf16 on compute capability 9 and 10; elsewhere it falls back to a loop
    that reads the offsets on the host (read in torch's source, not run here).
    """

    name = "grouped"
    delays_wgrad = True

    def __init__(self, *, alignment: int | Literal["auto"] = "auto") -> None:
        self.alignment: int | Literal["auto"] = alignment

    def __call__(
        self, received: Received, w_gate_up: Tensor, w_down: Tensor, late: tuple[Late, Late] | None = None
    ) -> Tensor:
        rows, weights, offsets = received.rows, received.row_weights, received.offsets
        if rows.shape[0] == 0:
            # Keeps an idle rank attached to the graph: its experts get zero gradients, and the reverse exchanges
            # of rows and of weights start, as the other ranks expect.
            for put_off, weight in zip(late or (), (w_gate_up, w_down)):
                put_off.put_off(partial(torch.zeros_like, weight.detach()), weight)
            return rows * weights.unsqueeze(-1).to(rows.dtype) + 0.0 * (w_gate_up.sum() + w_down.sum())
        late_gate_up, late_down = late or (None, None)
        gate_up = _GroupedMatmul.apply(rows, w_gate_up, offsets, late_gate_up)
        return _GroupedMatmul.apply(gated_activation(gate_up, weights), w_down, offsets, late_down)
