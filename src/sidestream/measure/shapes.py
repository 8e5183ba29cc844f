"""Shapes of the layer benchmark."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one MoE layer.

    Attributes:
        tokens: T, per rank.
        hidden_size: D.
        expert_hidden_size: F.
        num_experts: E, over all ranks.
        top_k: K.
    """

    name: str
    tokens: int
    hidden_size: int
    expert_hidden_size: int
    num_experts: int
    top_k: int

    @property
    def flops_per_token(self) -> int:
        """Forward and backward of the experts: three matrices, 2 per multiply-add, backward twice the forward."""
        return 3 * 2 * 3 * self.hidden_size * self.expert_hidden_size * self.top_k


SHAPES = {
    shape.name: shape
    for shape in (
        LayerShape("A", 2048, 256, 512, 8, 2),
        LayerShape("B", 4096, 512, 1024, 8, 2),
        LayerShape("C", 4096, 512, 256, 64, 8),
        LayerShape("D", 2048, 1024, 512, 64, 8),
        LayerShape("E", 8192, 256, 128, 64, 8),
    )
}


def listed() -> str:
    """The named shapes, as a help text has them."""
    return ", ".join(
        f"{s.name} {s.tokens},{s.hidden_size},{s.expert_hidden_size},{s.num_experts},{s.top_k}"
        for s in SHAPES.values()
    )


@dataclass(frozen=True)
class Case:
    """One shape at one number of ranks; every rank holds `num_experts / world_size` experts."""

    shape: LayerShape
    world_size: int


def parse_case(text: str) -> Case:
    """`A`, `A@2` (two ranks) or `T,D,F,E,K[@ranks]`.

    Raises:
        ValueError: It is none of these, or the experts cannot be shared out evenly.
    """
    name, _, ranks = text.partition("@")
    world_size = int(ranks) if ranks.isdigit() else 0 if ranks else 1
    shape = SHAPES.get(name)
    if shape is None:
        numbers = [int(part) for part in name.split(",") if part.isdigit()]
        if len(numbers) != 5 or min(numbers) < 1:
            raise ValueError(
                f"shape={text}: expected one of {', '.join(SHAPES)} or T,D,F,E,K, and @ranks behind"
            )
        shape = LayerShape(name, *numbers)
    if world_size < 1 or shape.num_experts % world_size:
        raise ValueError(f"shape={text}: expected a number of ranks that divides {shape.num_experts} experts")
    if shape.top_k > shape.num_experts:
        raise ValueError(f"shape={text}: top_k={shape.top_k} of only {shape.num_experts} experts")
    return Case(shape, world_size)
