"""The model's shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class MLAShape:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    Attributes:
        q_lora_rank: Width of the latent that queries are made of; None: queries come straight from the input.
        kv_lora_rank: Width of the latent that keys and values are made of.
        qk_nope_head_dim: Features of a query or key head that carry no position.
        qk_rope_head_dim: Features that do; their key is one for all heads.
        v_head_dim: Features of a value head.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a transformer with MoE layers, as in the config. Widths are features, not bytes.

    What may be None is derived: use `head_width` and `shared_width`. `num_mtp_layers` are layers of multi-token
    prediction (DeepSeek-V3, arXiv 2412.19437), which are counted and cannot be built.
    """

    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    ffn_hidden_size: int
    moe_layers: int | Sequence[int]
    num_experts: int
    expert_hidden_size: int
    num_shared_experts: int
    dropout: float
    activation_checkpointing: bool
    rope_theta: float
    norm_eps: float
    init_std: float
    head_dim: int | None = None
    qk_norm: Literal["none", "head", "full"] = "none"
    mla: MLAShape | None = None
    sliding_window: int | None = None
    full_attention_layers: int | Sequence[int] = ()
    first_dense_layers: int = 0
    shared_expert_hidden_size: int | None = None
    shared_expert_gate: bool = False
    tie_embeddings: bool = False
    num_mtp_layers: int = 0

    @property
    def head_width(self) -> int:
        """Features of a query, key or value head of grouped-query attention."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def shared_width(self) -> int:
        """Width inside the shared experts, all together; 0 without any."""
        return self.shared_expert_hidden_size or self.num_shared_experts * self.expert_hidden_size

    @property
    def moe_blocks(self) -> tuple[int, ...]:
        """Indices of the blocks that are MoE."""
        blocks = _blocks(self.moe_layers, self.num_layers)
        return tuple(i for i in blocks if i >= self.first_dense_layers)

    @property
    def windowed_blocks(self) -> tuple[int, ...]:
        """Indices of the blocks whose attention sees only the sliding window."""
        if self.sliding_window is None:
            return ()
        full = _blocks(self.full_attention_layers, self.num_layers)
        return tuple(i for i in range(self.num_layers) if i not in full)


def shape_from(values: dict[str, Any], *, vocab_size: int) -> ModelShape:
    """The shape that the plain values of a `model` option describe.

    Args:
        vocab_size: Taken where the option leaves it open.
    """
    values = {name: value for name, value in values.items() if name != "trainable"}
    stated, mla = values.pop("vocab_size", None), values.pop("mla", None)
    return ModelShape(vocab_size=stated or vocab_size, mla=mla and MLAShape(**mla), **values)


def _blocks(which: int | Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Every n-th block (the last of each n), or the given list."""
    if isinstance(which, int):
        return tuple(i for i in range(num_layers) if (i + 1) % which == 0)
    return tuple(which)
