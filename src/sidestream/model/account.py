"""Closed-form parameter and FLOP counts of a model shape.

Source of the FLOP formulas: Megatron-LM `num_floating_point_operations` (multiply-add = 2; causal attention counts
half of the score matrix; training = 3 x forward; router and embedding look-up are not counted).
"""

from __future__ import annotations

from dataclasses import dataclass

from sidestream.model.config import ModelShape


@dataclass(frozen=True)
class Account:
    """Counts of one model.

    Attributes:
        params_total: All trainable parameters, every expert counted once.
        params_active: Parameters that one token uses.
        flops_per_token: Forward and backward of one token, model FLOPs (no recomputation).
    """

    params_total: int
    params_active: int
    flops_per_token: int


def account(shape: ModelShape, *, top_k: int, seq_length: int) -> Account:
    """Count parameters and FLOPs of `shape` at a sequence length."""
    hidden, d = shape.hidden_size, shape.head_dim
    attention = hidden * (shape.num_heads + 2 * shape.num_kv_heads) * d + shape.num_heads * d * hidden
    expert = 3 * hidden * shape.expert_hidden_size
    moe_blocks = len(shape.moe_blocks)
    dense_blocks = shape.num_layers - moe_blocks
    norms = (2 * shape.num_layers + 1) * hidden
    common = 2 * shape.vocab_size * hidden + norms + shape.num_layers * attention
    common += dense_blocks * 3 * hidden * shape.ffn_hidden_size
    gate = shape.num_experts * hidden
    moe_fixed = gate + shape.num_shared_experts * expert
    total = common + moe_blocks * (moe_fixed + shape.num_experts * expert)
    active = common + moe_blocks * (moe_fixed + top_k * expert)

    matmul = shape.num_layers * attention + dense_blocks * 3 * hidden * shape.ffn_hidden_size
    matmul += moe_blocks * (shape.num_shared_experts + top_k) * expert + shape.vocab_size * hidden
    scores = shape.num_layers * 2 * seq_length * shape.num_heads * d
    return Account(total, active, 3 * (2 * matmul + scores))
