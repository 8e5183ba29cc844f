"""The experts' weights and the rule every fusion follows.

    out = (silu(rows @ w_gate) * (rows @ w_up) * row_weight) @ w_down

The routing weight enters before the down projection, once, for every fusion and dispatcher (as in Megatron).

Legend: S slots, H features, F expert width, L local experts.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

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


def gated_activation(gate_up: Tensor, row_weights: Tensor) -> Tensor:
    """`silu(gate) * up * weight`: `[S, 2F]`, `[S]` fp32 -> `[S, F]`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up * row_weights.unsqueeze(-1).to(gate_up.dtype)
