"""Closed-form parameter and FLOP counts of a model shape.

Source of the FLOP formulas: Megatron-LM `num_floating_point_operations` (multiply-add = 2; causal attention counts
half of the score matrix; training = 3 x forward; router, norms and embedding look-up are not counted).
"""

from __future__ import annotations

from dataclasses import dataclass

from sidestream.model.config import MLAShape, ModelShape


@dataclass(frozen=True)
class Account:
    """Counts of one model.

    Attributes:
        params_total: All trainable parameters, every expert and a tied head counted once.
        params_active: Parameters that one token uses: `top_k` of the experts, everything else whole, the embedding
            too. Some publishers leave the embedding out because a token reads one row of it.
        params_embedding: The embedding, part of both.
        flops_per_token: Forward and backward of one token, model FLOPs (no recomputation).
    """

    params_total: int
    params_active: int
    params_embedding: int
    flops_per_token: int


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs of one token's forward pass, by part; backward takes twice as many again. Blocks are numbered from 0.

    Attributes:
        projections: One attention's projections: everything but scores and values.
        scores: Per block: queries times keys, and scores times values, over the tokens that are seen.
        ffn: One dense feed-forward.
        routed, shared: One MoE layer's `top_k` routed experts, and its shared ones.
        head: The output projection.
        mtp_projection: One multi-token prediction layer's projection of two hidden states to one; the layer has
            an attention, a MoE layer and the head beside it.
    """

    projections: int
    scores: tuple[float, ...]
    ffn: int
    routed: int
    shared: int
    head: int
    mtp_projection: int

    def total(self, shape: ModelShape) -> float:
        """FLOPs of the whole model, forward pass of one token."""
        moe_blocks, mtp = len(shape.moe_blocks), shape.num_mtp_layers
        moe = self.routed + self.shared
        body = shape.num_layers * self.projections + sum(self.scores)
        body += moe_blocks * moe + (shape.num_layers - moe_blocks) * self.ffn + self.head
        return body + mtp * (self.projections + self.scores[-1] + moe + self.mtp_projection + self.head)


def forward_flops(shape: ModelShape, *, top_k: int, seq_length: int) -> ForwardFlops:
    """The parts of `Account.flops_per_token`, for one forward pass."""
    hidden = shape.hidden_size
    linears, scores_width, _ = _attention(shape)
    shared = 3 * hidden * shape.shared_width + (_output_gate(shape) if shape.shared_width else 0)
    return ForwardFlops(
        projections=2 * linears,
        scores=tuple(2 * scores_width * seen for seen in _seen(shape, seq_length)),
        ffn=6 * hidden * shape.ffn_hidden_size,
        routed=6 * hidden * shape.expert_hidden_size * top_k,
        shared=2 * shared,
        head=2 * shape.vocab_size * hidden,
        mtp_projection=4 * hidden * hidden,
    )


def account(shape: ModelShape, *, top_k: int, seq_length: int, extra_per_unit: int = 0) -> Account:
    """Count parameters and FLOPs of `shape` at a sequence length.

    Args:
        shape: Model shape.
        top_k: Routed experts that a token uses in a layer.
        seq_length: Tokens per sequence.
        extra_per_unit: Parameters that a schedule adds to each MoE block: norms and gates, which every token uses
            and whose FLOPs are not counted.
    """
    hidden, moe_blocks = shape.hidden_size, len(shape.moe_blocks)
    linears, _, attention_norms = _attention(shape)
    expert = 3 * hidden * shape.expert_hidden_size
    shared = (3 * hidden * shape.shared_width + _output_gate(shape)) if shape.shared_width else 0
    ffns = (shape.num_layers - moe_blocks) * 3 * hidden * shape.ffn_hidden_size
    embedding = shape.vocab_size * hidden

    matmul = shape.num_layers * linears + ffns + moe_blocks * shared  # parameters that multiply every token
    fixed = matmul + embedding * (1 if shape.tie_embeddings else 2)
    fixed += shape.num_layers * (2 * hidden + attention_norms) + hidden  # norms
    fixed += moe_blocks * (shape.num_experts * hidden + extra_per_unit)  # gates
    # A multi-token prediction layer is a MoE block with two norms more, behind a projection; the head is the model's.
    mtp_layer = (
        linears + shared + 2 * hidden * hidden + 4 * hidden + attention_norms + shape.num_experts * hidden
    )
    fixed += shape.num_mtp_layers * mtp_layer
    moe_layers = moe_blocks + shape.num_mtp_layers
    total = fixed + moe_layers * shape.num_experts * expert
    active = fixed + moe_layers * top_k * expert
    flops = forward_flops(shape, top_k=top_k, seq_length=seq_length).total(shape)
    return Account(total, active, embedding, round(3 * flops))


def _attention(shape: ModelShape) -> tuple[int, int, int]:
    """One attention: parameters of its projections; features of all heads, in scores and values; norm weights."""
    hidden, heads = shape.hidden_size, shape.num_heads
    if shape.mla is not None:
        mla: MLAShape = shape.mla
        q_width, kv_width = heads * mla.qk_head_dim, heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        rank = mla.q_lora_rank
        query = hidden * q_width if rank is None else rank * (hidden + q_width)
        key_value = hidden * (mla.kv_lora_rank + mla.qk_rope_head_dim) + mla.kv_lora_rank * kv_width
        linears = query + key_value + heads * mla.v_head_dim * hidden
        return linears, heads * (mla.qk_head_dim + mla.v_head_dim), (rank or 0) + mla.kv_lora_rank
    d = shape.head_width
    linears = hidden * (heads + 2 * shape.num_kv_heads) * d + heads * d * hidden
    norms = {"none": 0, "head": 2 * d, "full": (heads + shape.num_kv_heads) * d}[shape.qk_norm]
    return linears, 2 * heads * d, norms


def _output_gate(shape: ModelShape) -> int:
    return shape.hidden_size if shape.shared_expert_gate else 0


def _seen(shape: ModelShape, seq_length: int) -> tuple[float, ...]:
    """How many tokens a token attends to on average, per block: S / 2, in a window w (1 - w / 2S)."""
    window = min(shape.sliding_window or seq_length, seq_length)
    inside = window * (1 - window / (2 * seq_length))
    return tuple(
        inside if block in shape.windowed_blocks else seq_length / 2 for block in range(shape.num_layers)
    )
