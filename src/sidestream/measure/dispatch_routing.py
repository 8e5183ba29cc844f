"""What every dispatcher of a comparison is given: the routing of each round, and what it makes necessary.

The routing is drawn from a seed, the number of the round and the rank, so every arm gets the same one, also an arm that
is measured in another environment. Its hash says whether that worked.

Legend: T tokens of this rank, K routes per token, E experts, R ranks, L = E / R experts of a rank, H features.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sidestream.measure.problem import LOGIT_STD
from sidestream.measure.shapes import LayerShape

ROUTINGS = ("uniform", "zipf", "one_rank")
ZIPF_S = 1.0
_FAR = 1e3  # more than any two logits differ by


@dataclass(frozen=True)
class Draw:
    """The routing of one round on one rank, on the host.

    Attributes:
        ids: `[T, K]` int64; -1 is no route.
        weights: `[T, K]` fp32, softmax over the K routes.
        complete: No id is -1.
    """

    ids: Tensor
    weights: Tensor
    complete: bool = True


def draw_routing(
    kind: str,
    shape: LayerShape,
    *,
    seed: int,
    draw: int,
    rank: int,
    world_size: int,
    tokens: int | None = None,
) -> Draw:
    """Draw the routing of one round.

    Args:
        kind: `uniform`: top-k of `1.28 * N(0, 1)`. `zipf`: of `1.28 * N(0, 1) - log(rank of the expert)`, with expert
            0 the most popular, so rank 0 gets most. `one_rank`: every route goes to an expert of rank 0, as far as it
            has K of them.
        draw: Number of the round; another number gives another routing.
        tokens: T if it is not the one of the shape.
    """
    key = hashlib.sha256(f"{kind}/{seed}/{draw}/{rank}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
    num_tokens = shape.tokens if tokens is None else tokens
    logits = torch.randn(num_tokens, shape.num_experts, generator=generator) * LOGIT_STD
    order = logits
    if kind == "zipf":
        order = logits = logits - torch.tensor(
            [ZIPF_S * math.log(place) for place in range(1, shape.num_experts + 1)]
        )
    elif kind == "one_rank":
        order = logits.clone()
        order[:, : shape.num_experts // world_size] += _FAR
    elif kind != "uniform":
        raise ValueError(f"routing={kind}: expected one of {', '.join(ROUTINGS)}")
    ids = order.topk(shape.top_k, dim=-1).indices
    return Draw(ids, torch.softmax(logits.gather(1, ids), dim=-1))


def pairs(ids: Tensor, *, num_local: int, world_size: int) -> Tensor:
    """`[T, K]` expert ids -> `[R]` int64: tokens of this rank with at least one route to each rank, its own too."""
    owner = torch.div(ids, num_local, rounding_mode="floor")  # -1 stays -1
    return torch.stack([(owner == rank).any(dim=-1).sum() for rank in range(world_size)])


@dataclass(frozen=True)
class Necessary:
    """Rows that a routing makes necessary, of all ranks.

    Attributes:
        matrix: `[R][R]`, distinct (token, rank) pairs from each rank to each rank.
        row_bytes: `H x bytes of a value`.
    """

    matrix: list[list[int]]
    row_bytes: int

    @property
    def dispatched(self) -> list[int]:
        """Fewest bytes each rank must send to others in dispatch: one row per token and *other* rank."""
        return [self.row_bytes * (sum(row) - row[rank]) for rank, row in enumerate(self.matrix)]

    @property
    def combined(self) -> list[int]:
        """Fewest bytes each rank must send back in combine: one sum per row that it received."""
        columns = list(zip(*self.matrix))
        return [self.row_bytes * (sum(column) - column[rank]) for rank, column in enumerate(columns)]

    @property
    def of_cycle(self) -> int:
        """Of all ranks in the four exchanges of a training step: the gradients travel the same ways back."""
        return 2 * (sum(self.dispatched) + sum(self.combined))

    @property
    def logical(self) -> int:
        """Bytes of the (token, rank) pairs, the own rank's included, that the busiest rank sends or receives."""
        sent, received = map(sum, self.matrix), map(sum, zip(*self.matrix))
        return self.row_bytes * max(*sent, *received)


def necessary(ids: Tensor, shape: LayerShape, *, world_size: int, value_bytes: int) -> Necessary:
    """Count on every rank and tell all. Collective."""
    mine = pairs(ids, num_local=shape.num_experts // world_size, world_size=world_size)
    matrix: list[list[int]] = [[] for _ in range(world_size)]
    dist.all_gather_object(matrix, mine.tolist())
    return Necessary(matrix, shape.hidden_size * value_bytes)


class RoutingHash:
    """Of every routing that was drawn for a measurement, over all ranks."""

    def __init__(self) -> None:
        self._seen: dict[int, bytes] = {}

    def add(self, number: int, draw: Draw) -> None:
        """Take in a round; a round that was seen already changes nothing."""
        if number not in self._seen:
            self._seen[number] = hashlib.sha256(draw.ids.numpy().tobytes()).digest()

    def value(self) -> str:
        """The hash as hexadecimal digits. Collective."""
        mine = b"".join(self._seen[number] for number in sorted(self._seen))
        everyone: list[bytes] = [b""] * dist.get_world_size()
        dist.all_gather_object(everyone, hashlib.sha256(mine).digest())
        return hashlib.sha256(b"".join(everyone)).hexdigest()[:16]


def activation_bytes(rows: int, shape: LayerShape, *, value_bytes: int) -> int:
    """Bytes that the experts keep until backward for a buffer of so many rows.

    Per row: the row (H) and the inputs of the two things behind it, gate and up (2F) and their product (F), in the
    type of the rows, and the routing weight in fp32: `rows x ((H + 3F) x bytes + 4)`.
    """
    return rows * ((shape.hidden_size + 3 * shape.expert_hidden_size) * value_bytes + 4)
