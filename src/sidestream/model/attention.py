"""Attention: grouped-query, and multi-head latent.

Legend: B sequences, S tokens, H features, N heads, G key-value heads, D features per head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sidestream.model.config import MLAShape, ModelShape
from sidestream.model.context import PLAIN, TokenContext
from sidestream.model.layers import RMSNorm


class Rope:
    """Rotary positions (Su et al. 2021). The two halves of the D features form the pairs.

    Args:
        dim: D, even.
        theta: Base of the frequencies.
    """

    def __init__(self, dim: int, *, theta: float) -> None:
        self.dim, self.theta = dim, theta
        self._tables: tuple[Tensor, Tensor] | None = None

    def at(self, context: TokenContext, *, seq_length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cos and sin, fp32: `[S, D / 2]`, or `[B, 1, S, D / 2]` for a context with positions."""
        if self._tables is None or self._tables[0].shape[0] < seq_length or self._tables[0].device != device:
            with torch.inference_mode(False):  # made in validation, used in training
                self._tables = rope_tables(seq_length, self.dim, self.theta, device)
        cos, sin = self._tables[0][:seq_length], self._tables[1][:seq_length]
        if context.positions is not None:  # the same for all heads
            cos, sin = cos[context.positions].unsqueeze(1), sin[context.positions].unsqueeze(1)
        return cos, sin


def rope_tables(seq_length: int, dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin `[S, D / 2]` fp32."""
    frequency = theta ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
    angle = torch.outer(torch.arange(seq_length, device=device, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `[B, N, S, D]`. Computed in fp32, returned in the dtype of `x`."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions.

    With `qk_norm` queries and keys are normalised before they are rotated: `head` norms each head with one weight
    for all of them (Qwen3), `full` norms the whole projection (OLMoE).
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = shape.num_heads, shape.num_kv_heads
        self.head_dim = shape.head_width
        width = (shape.num_heads + 2 * shape.num_kv_heads) * self.head_dim
        self.qkv = nn.Linear(shape.hidden_size, width, bias=False)
        self.out = nn.Linear(shape.num_heads * self.head_dim, shape.hidden_size, bias=False)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if shape.qk_norm != "none":
            q_heads, k_heads = (1, 1) if shape.qk_norm == "head" else (self.num_heads, self.num_kv_heads)
            self.q_norm = RMSNorm(q_heads * self.head_dim, eps=shape.norm_eps)
            self.k_norm = RMSNorm(k_heads * self.head_dim, eps=shape.norm_eps)
        self._rope = Rope(self.head_dim, theta=shape.rope_theta)

    def forward(self, x: Tensor, context: TokenContext = PLAIN) -> Tensor:
        """`[B, S, H]` -> `[B, S, H]`."""
        batch, seq, _ = x.shape
        cos, sin = self._rope.at(context, seq_length=seq, device=x.device)
        heads = self.qkv(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        q, k, v = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = _norm_heads(self.q_norm, q), _norm_heads(self.k_norm, k)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        return self.out(_attend(q, k, v, context))


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1.2; the form used in training).

    Queries, and keys with values, come from a narrow normalised latent each. A head's query and key are
    `[nope | rope]`: features without position, and rotated ones whose key is shared by all heads.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        assert shape.mla is not None
        mla: MLAShape = shape.mla
        self.mla, self.num_heads = mla, shape.num_heads
        hidden, q_width = shape.hidden_size, shape.num_heads * mla.qk_head_dim
        if mla.q_lora_rank is None:
            self.q = nn.Linear(hidden, q_width, bias=False)
        else:
            self.q_a = nn.Linear(hidden, mla.q_lora_rank, bias=False)
            self.q_norm = RMSNorm(mla.q_lora_rank, eps=shape.norm_eps)
            self.q_b = nn.Linear(mla.q_lora_rank, q_width, bias=False)
        self.kv_a = nn.Linear(hidden, mla.kv_lora_rank + mla.qk_rope_head_dim, bias=False)
        self.kv_norm = RMSNorm(mla.kv_lora_rank, eps=shape.norm_eps)
        kv_width = shape.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        self.kv_b = nn.Linear(mla.kv_lora_rank, kv_width, bias=False)
        self.out = nn.Linear(shape.num_heads * mla.v_head_dim, hidden, bias=False)
        self._rope = Rope(mla.qk_rope_head_dim, theta=shape.rope_theta)

    def forward(self, x: Tensor, context: TokenContext = PLAIN) -> Tensor:
        """`[B, S, H]` -> `[B, S, H]`."""
        mla, (batch, seq, _) = self.mla, x.shape
        cos, sin = self._rope.at(context, seq_length=seq, device=x.device)
        query = self.q(x) if mla.q_lora_rank is None else self.q_b(self.q_norm(self.q_a(x)))
        latent, k_rope = self.kv_a(x).split([mla.kv_lora_rank, mla.qk_rope_head_dim], dim=-1)
        q_nope, q_rope = self._heads(query).split([mla.qk_nope_head_dim, mla.qk_rope_head_dim], dim=-1)
        key_value = self._heads(self.kv_b(self.kv_norm(latent)))
        k_nope, v = key_value.split([mla.qk_nope_head_dim, mla.v_head_dim], dim=-1)
        k_rope = apply_rope(k_rope.unsqueeze(1), cos, sin).expand(batch, self.num_heads, seq, -1)
        q = torch.cat([q_nope, apply_rope(q_rope, cos, sin)], dim=-1)
        k = torch.cat([k_nope, k_rope], dim=-1)
        return self.out(_attend(q, k, v, context))

    def _heads(self, x: Tensor) -> Tensor:
        """`[B, S, N * D]` -> `[B, N, S, D]`."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


def _norm_heads(norm: RMSNorm, x: Tensor) -> Tensor:
    """Norm `[B, N, S, D]` over D, or over N and D if the norm is that wide."""
    if norm.weight.shape[0] == x.shape[-1]:
        return norm(x)
    return norm(x.transpose(1, 2).flatten(2)).unflatten(-1, (x.shape[1], -1)).transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, context: TokenContext) -> Tensor:
    """`[B, N, S, D]`, keys and values `[B, G, S, D]` -> `[B, S, N * D of the values]`."""
    y = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=context.mask,
        is_causal=context.mask is None,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return y.transpose(1, 2).flatten(2)
