"""The model's shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a transformer with MoE layers. Widths are features, not bytes; `moe_layers` as in the config."""

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

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def moe_blocks(self) -> tuple[int, ...]:
        """Indices of the blocks that are MoE: every n-th (the last of each n), or the given list."""
        if isinstance(self.moe_layers, int):
            return tuple(i for i in range(self.num_layers) if (i + 1) % self.moe_layers == 0)
        return tuple(self.moe_layers)
