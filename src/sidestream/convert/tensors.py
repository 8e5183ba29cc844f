"""Our tensors <-> Hugging Face tensors, name by name, as pieces of one of ours.

Legend: H features, F expert width, L local experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from sidestream.convert.families import Family
from sidestream.model.config import ModelShape

Index = tuple[int | slice, ...]


@dataclass(frozen=True)
class Piece:
    """One Hugging Face tensor as a part of one of ours.

    Attributes:
        name: Its name.
        index: The part of ours.
        transposed: Ours is `[in, out]`, theirs `[out, in]`.
    """

    name: str
    index: Index
    transposed: bool = False

    def put(self, ours: Tensor, theirs: Tensor) -> None:
        """Copy theirs into our tensor, in our dtype."""
        ours[self.index].copy_(theirs.t() if self.transposed else theirs)

    def take(self, ours: Tensor) -> Tensor:
        """Their tensor, contiguous."""
        part = ours[self.index]
        return (part.t() if self.transposed else part).contiguous().clone()


_ALL: Index = (slice(None),)


def pieces(name: str, shape: ModelShape, family: Family, experts: range) -> Iterator[Piece]:
    """The Hugging Face tensors that make up our parameter `name`.

    Args:
        name: A name of `MoETransformer.named_parameters()`.
        shape: The model's shape.
        family: Whose names.
        experts: Global ids of the experts in our stacked tensors, in order.

    Raises:
        KeyError: The family has no counterpart.
    """
    top = {
        "embedding.weight": "model.embed_tokens",
        "final_norm.weight": "model.norm",
        "head.weight": "lm_head",
    }
    if name in top:
        yield Piece(f"{top[name]}.weight", _ALL)
        return
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    if match is None:
        raise KeyError(name)
    layer, rest = f"model.layers.{match[1]}", match[2]
    attention, moe = f"{layer}.self_attn", f"{layer}.{family.moe}"
    gate, up, down = family.gate_up_down
    plain = {
        "attention_norm.weight": f"{layer}.input_layernorm.weight",
        "norm.weight": f"{layer}.post_attention_layernorm.weight",
        "self_attention.out.weight": f"{attention}.o_proj.weight",
        "self_attention.q_norm.weight": f"{attention}.q_norm.weight",
        "self_attention.k_norm.weight": f"{attention}.k_norm.weight",
        "moe.gate": f"{moe}.gate.weight",
        "ffn.down.weight": f"{layer}.mlp.down_proj.weight",
    }
    if rest in plain:
        yield Piece(plain[rest], _ALL)
    elif rest == "self_attention.qkv.weight":
        q, kv = shape.num_heads * shape.head_width, shape.num_kv_heads * shape.head_width
        yield Piece(f"{attention}.q_proj.weight", (slice(0, q),))
        yield Piece(f"{attention}.k_proj.weight", (slice(q, q + kv),))
        yield Piece(f"{attention}.v_proj.weight", (slice(q + kv, q + 2 * kv),))
    elif rest == "ffn.gate_up.weight":
        width = shape.ffn_hidden_size
        yield Piece(f"{layer}.mlp.gate_proj.weight", (slice(0, width),))
        yield Piece(f"{layer}.mlp.up_proj.weight", (slice(width, 2 * width),))
    elif rest == "moe.experts.w_gate_up":
        width = shape.expert_hidden_size
        for index, expert in enumerate(experts):
            prefix = f"{moe}.experts.{expert}"
            yield Piece(f"{prefix}.{gate}.weight", (index, slice(None), slice(0, width)), transposed=True)
            yield Piece(
                f"{prefix}.{up}.weight", (index, slice(None), slice(width, 2 * width)), transposed=True
            )
    elif rest == "moe.experts.w_down":
        for index, expert in enumerate(experts):
            yield Piece(f"{moe}.experts.{expert}.{down}.weight", (index,), transposed=True)
    else:
        raise KeyError(name)
