"""The experts' weights and the rule every fusion follows.

    out = (silu(rows @ w_gate) * (rows @ w_up) * row_weight) @ w_down

The routing weight enters before the down projection, once, for every fusion and dispatcher (as in Megatron).

Legend: S slots, H features, F expert width, L local experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sidestream.dispatch.base import Pending, Received, Routing


class Fusion(Protocol):
    """Computes the local experts."""

    name: str
    alignment: int | Literal["auto"]

    def __call__(self, received: Received, w_gate_up: Tensor, w_down: Tensor) -> Tensor:
        """Run the experts. One that can put off its weight gradients has `delays_wgrad` and a fourth argument `late`.

        Args:
            received: Expert-major rows `[S, H]`; what lies past the last offset is never read.
            w_gate_up: `[L, H, 2F]`, gate then up.
            w_down: `[L, F, H]`.

        Returns:
            `[S, H]`; rows past the last offset are undefined, and so is their gradient in both directions.
        """
        ...


class Fused(Protocol):
    """A fusion that does the whole routed path in one operation. It is its own dispatcher, see `mega.fused`."""

    fuses_shared: bool
    replaces_dispatcher: bool

    def start(
        self, x: Tensor, routing: Routing, weights: Sequence[Tensor], *, layer: int, recompute: bool
    ) -> Pending[Tensor]:
        """Start the routed path of `x` `[T, H]`; what is returned waits for `[T, H]`."""
        ...


def fused_of(fusion: Any) -> Any:
    """The fusion, if it does the whole routed path and takes the dispatcher's place; else None."""
    return fusion if getattr(fusion, "replaces_dispatcher", False) else None


def resolve_alignment(alignment: int | Literal["auto"], *, dtype: torch.dtype, device_type: str) -> int:
    """Rows per expert are padded to a multiple of this.

    `auto` is 16 for bf16 on a CPU, where the GEMM library builds a new kernel for every new row count (about 4x
    slower when counts change from call to call, as they do in training), and 1 elsewhere.
    """
    if alignment == "auto":
        return 16 if dtype == torch.bfloat16 and device_type == "cpu" else 1
    return int(alignment)


# Elements of a block of rows on a CPU: what an operator writes is still in the core's cache when the next one reads it.
_BLOCK = 2**18


def _row_blocks(rows: Tensor, width: int) -> list[slice]:
    """Cut rows into blocks for a CPU; one block elsewhere, where a launch costs more than a trip to memory."""
    num_rows = rows.shape[0]
    size = max(1, _BLOCK // width) if rows.device.type == "cpu" else max(1, num_rows)
    return [slice(begin, min(begin + size, num_rows)) for begin in range(0, num_rows, size)]


def activate(gate_up: Tensor, row_weights: Tensor, *, out: Tensor) -> None:
    """`silu(gate) * up * weight` into `out` `[S, F]`; `[S, 2F]`, `[S]` fp32. No gradient."""
    gate, up = gate_up.chunk(2, dim=-1)
    weights = row_weights.unsqueeze(-1).to(gate_up.dtype)
    for rows in _row_blocks(out, out.shape[1]):
        torch.ops.aten.silu.out(gate[rows], out=out[rows])
        out[rows].mul_(up[rows]).mul_(weights[rows])


def activate_backward(
    gate_up: Tensor,
    row_weights: Tensor,
    grad: Tensor,
    *,
    grad_gate_up: Tensor,
    grad_weights: Tensor,
    out: Tensor | None = None,
) -> None:
    """The gradient of `activate`, in as few passes over memory as it takes.

    Args:
        gate_up, row_weights: The inputs of `activate`.
        grad: The gradient of its output, `[S, F]`.
        grad_gate_up, grad_weights: Filled, `[S, 2F]` and `[S]` fp32.
        out: Filled with the output of the forward pass, if there.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    weights = row_weights.unsqueeze(-1).to(gate_up.dtype)
    grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
    for rows in _row_blocks(grad, grad.shape[1]):
        product = F.silu(gate[rows])
        if out is not None:
            torch.mul(product, up[rows], out=out[rows]).mul_(weights[rows])
        product.mul_(grad[rows])
        torch.mul(product, weights[rows], out=grad_up[rows])
        grad_weights[rows] = product.mul_(up[rows]).sum(dim=-1, dtype=torch.float32)
        torch.mul(grad[rows], up[rows], out=product).mul_(weights[rows])
        torch.ops.aten.silu_backward.grad_input(product, gate[rows], grad_input=grad_gate[rows])


class _GatedActivation(torch.autograd.Function):
    """Keeps only its inputs: the product is cheap to form again, and a buffer of rows is what a layer has most of."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, row_weights: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, row_weights)
        out = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
        activate(gate_up, row_weights, out=out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        gate_up, row_weights = ctx.saved_tensors
        grad_gate_up, grad_weights = torch.empty_like(gate_up), torch.empty_like(row_weights)
        activate_backward(gate_up, row_weights, grad, grad_gate_up=grad_gate_up, grad_weights=grad_weights)
        return grad_gate_up, grad_weights


def gated_activation(gate_up: Tensor, row_weights: Tensor) -> Tensor:
    """`silu(gate) * up * weight`: `[S, 2F]`, `[S]` fp32 -> `[S, F]`."""
    return _GatedActivation.apply(gate_up, row_weights)
