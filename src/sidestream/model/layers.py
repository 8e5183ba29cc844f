"""Attention, feed-forward, norm.

Legend: B sequences, S tokens, H features, N heads, G key-value heads, D features per head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sidestream.model.config import ModelShape
from sidestream.model.context import PLAIN, TokenContext


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich 2019). Statistics are fp32 whatever the input's dtype."""

    def __init__(self, hidden_size: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """`[..., H]` -> `[..., H]` in the dtype of `x`."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


def rope_tables(seq_length: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin `[S, D / 2]` fp32 (Su et al. 2021)."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(seq_length, device=device, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `[B, N, S, D]`; the two halves of D form the pairs. Computed in fp32, returned in the dtype of `x`."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = (
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
        )
        self.theta = shape.rope_theta
        width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        self.qkv = nn.Linear(shape.hidden_size, width, bias=False)
        self.out = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)
        self._rope: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, context: TokenContext = PLAIN) -> Tensor:
        """`[B, S, H]` -> `[B, S, H]`."""
        batch, seq, _ = x.shape
        if self._rope is None or self._rope[0].shape[0] < seq or self._rope[0].device != x.device:
            with torch.inference_mode(False):  # made in validation, used in training
                self._rope = rope_tables(seq, self.head_dim, self.theta, x.device)
        cos, sin = self._rope[0][:seq], self._rope[1][:seq]
        if context.positions is not None:  # [B, S, D / 2] -> [B, 1, S, D / 2], the same for all heads
            cos, sin = cos[context.positions].unsqueeze(1), sin[context.positions].unsqueeze(1)
        heads = self.qkv(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=context.mask,
            is_causal=context.mask is None,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )
        return self.out(y.transpose(1, 2).reshape(batch, seq, -1))


class SwiGLU(nn.Module):
    """Gated feed-forward (Shazeer 2020): `down(silu(gate(x)) * up(x))`."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden_size, 2 * ffn_hidden_size, bias=False)
        self.down = nn.Linear(ffn_hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


def run(module: nn.Module, *inputs: Any, recompute: bool) -> Tensor:
    """Call a module; with `recompute` its activations are dropped and computed again in backward.

    Only for modules that hold no exchange and no routing: repeating those would repeat collectives.
    """
    if recompute and torch.is_grad_enabled():
        return checkpoint(module, *inputs, use_reentrant=False)
    return module(*inputs)
