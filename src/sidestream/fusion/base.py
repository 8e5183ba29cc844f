"""The experts' weights and the rule every fusion follows.

    out = (silu(rows @ w_gate) * (rows @ w_up) * row_weight) @ w_down

The routing weight enters before the down projection, once, for every fusion and dispatcher (as in Megatron).

Legend: S slots, H features, F expert width, L local experts.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sidestream.dispatch.base import Received


class Fusion(Protocol):
    """Computes the local experts."""

    name: str
    alignment: int | Literal["auto"]

    def __call__(self, received: Received, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
        """Run the experts.

        Args:
            received: Expert-major rows `[S, H]`; what lies past the last offset is never read.
            w_gate_up: `[L, H, 2F]`, gate then up.
            w_down: `[L, F, H]`.

        Returns:
            `[S, H]`; rows past the last offset are zero.
        """
        ...


def resolve_alignment(alignment: int | Literal["auto"], *, dtype: torch.dtype, device_type: str) -> int:
    """Rows per expert are padded to a multiple of this.

    `auto` is 16 for bf16 on a CPU, where the GEMM library builds a new kernel for every new row count (about 4x
    slower when counts change from call to call, as they do in training), and 1 elsewhere.
    """
    if alignment == "auto":
        return 16 if dtype == torch.bfloat16 and device_type == "cpu" else 1
    return int(alignment)


class _GatedActivation(torch.autograd.Function):
    """`silu(gate) * up * weight`, and its gradient in as few passes over memory as it takes.

    Keeps only its inputs: the product is cheap to form again, and a buffer of rows is what an MoE layer has most of.
    """

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, row_weights: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, row_weights)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up).mul_(row_weights.unsqueeze(-1).to(gate_up.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        gate_up, row_weights = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        activated = F.silu(gate)
        grad_weights = (grad * activated).mul_(up).sum(dim=-1, dtype=torch.float32).to(row_weights.dtype)
        grad = grad * row_weights.unsqueeze(-1).to(grad.dtype)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        torch.mul(grad, activated, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad.mul_(up), gate, grad_input=grad_gate)
        return grad_gate_up, grad_weights


def gated_activation(gate_up: Tensor, row_weights: Tensor) -> Tensor:
    """`silu(gate) * up * weight`: `[S, 2F]`, `[S]` fp32 -> `[S, F]`."""
    return _GatedActivation.apply(gate_up, row_weights)
