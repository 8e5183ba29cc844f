"""Embedding, feed-forward, norm, recomputation.

Legend: H features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019). Statistics are fp32 whatever the input's dtype."""

    def __init__(self, hidden_size: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """`[..., H]` -> `[..., H]` in the dtype of `x`."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class Embedding(nn.Embedding):
    """Rows of a table. A row's gradient is the sum over the tokens that read it, in fp32, rounded once."""

    def forward(self, input: Tensor) -> Tensor:
        """`[...]` int64 -> `[..., H]`."""
        if self.weight.dtype == torch.bfloat16 and self.weight.device.type == "cpu":
            return _WideGradient.apply(self.weight, input)
        return super().forward(input)


class _WideGradient(torch.autograd.Function):
    """On a CPU the gradient of a bf16 table is added up in bf16: of 256 and 255 ones nothing but the 256 is left."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.num_rows = weight.shape[0]
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (tokens,) = ctx.saved_tensors
        wide = torch.ops.aten.embedding_dense_backward(grad.float(), tokens, ctx.num_rows, -1, False)
        return wide.to(grad.dtype), None


class SwiGLU(nn.Module):
    """Gated feed-forward (Shazeer 2020): `down(silu(gate(x)) * up(x))`."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden_size, 2 * ffn_hidden_size, bias=False)
        self.down = nn.Linear(ffn_hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.up(x), x)

    def up(self, x: Tensor) -> Tensor:
        """The first of two parts of `forward`: `[..., H]` -> `[..., F]`."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return F.silu(gate) * up

    def out(self, inner: Tensor, x: Tensor) -> Tensor:
        """The second: `[..., F]`, and the input of the first, -> `[..., H]`."""
        return self.down(inner)


class GatedSwiGLU(SwiGLU):
    """A feed-forward that every token scales by `sigmoid(x w)` (the shared expert of Qwen2-MoE, arXiv 2407.10671)."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__(hidden_size, ffn_hidden_size)
        self.output_gate = nn.Linear(hidden_size, 1, bias=False)

    def out(self, inner: Tensor, x: Tensor) -> Tensor:
        y = super().out(inner, x)
        return y * torch.sigmoid(self.output_gate(x).float()).to(y.dtype)


def run(module: Callable[..., Tensor], *inputs: Any, recompute: bool) -> Tensor:
    """Call a module; with `recompute` its activations are dropped and computed again in backward.

    Only for modules that hold no exchange and no routing: repeating those would repeat collectives.
    """
    if recompute and torch.is_grad_enabled():
        return checkpoint(module, *inputs, use_reentrant=False)
    return module(*inputs)
