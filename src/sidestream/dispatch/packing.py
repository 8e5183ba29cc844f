"""What travels: one row per token and destination rank, one per token and route, or every token to every rank.

A packing gives each token C columns; column c of token t is one row for rank `destinations[t, c]`, or none (-1).

Legend: T tokens, K routes per token, C columns per token, R ranks, L local experts.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Packing(Protocol):
    """How routes become rows that travel.

    Attributes:
        per_route: A row carries one route; otherwise it carries all K, those of other ranks as -1.
        even: Every pair of ranks exchanges the same number of rows, whatever the routing.
    """

    per_route: bool
    even: bool

    def columns(self, top_k: int, num_ranks: int) -> int:
        """C."""
        ...

    def rows_per_pair(self, max_tokens: int, top_k: int, num_local: int) -> int:
        """Most rows that one rank can have for another, given that no token chooses an expert twice."""
        ...

    def destinations(self, expert_ids: Tensor, num_local: int, num_ranks: int) -> Tensor:
        """`[T, K]` global expert ids, -1 for none -> `[T, C]` int64 ranks, -1 for none."""
        ...


class PerRoute:
    """One row per (token, route): the plain all-to-all."""

    per_route = True
    even = False

    def columns(self, top_k: int, num_ranks: int) -> int:
        return top_k

    def rows_per_pair(self, max_tokens: int, top_k: int, num_local: int) -> int:
        return max_tokens * min(top_k, num_local)

    def destinations(self, expert_ids: Tensor, num_local: int, num_ranks: int) -> Tensor:
        return torch.div(expert_ids, num_local, rounding_mode="floor")  # -1 stays -1


class PerRank:
    """One row per (token, rank that has one of its experts): what DeepEP, HybridEP and NCCL EP send."""

    per_route = False
    even = False

    def columns(self, top_k: int, num_ranks: int) -> int:
        return num_ranks

    def rows_per_pair(self, max_tokens: int, top_k: int, num_local: int) -> int:
        return max_tokens

    def destinations(self, expert_ids: Tensor, num_local: int, num_ranks: int) -> Tensor:
        rank = torch.div(expert_ids, num_local, rounding_mode="floor")
        # The last column takes routes to nobody, and is cut off.
        hit = torch.zeros((len(rank), num_ranks + 1), dtype=torch.bool, device=rank.device)
        hit.scatter_(1, torch.where(rank < 0, num_ranks, rank), True)
        ranks = torch.arange(num_ranks, device=rank.device)
        return torch.where(hit[:, :num_ranks], ranks, -1)


class ToAll:
    """Every token to every rank, whatever its routes."""

    per_route = False
    even = True

    def columns(self, top_k: int, num_ranks: int) -> int:
        return num_ranks

    def rows_per_pair(self, max_tokens: int, top_k: int, num_local: int) -> int:
        return max_tokens

    def destinations(self, expert_ids: Tensor, num_local: int, num_ranks: int) -> Tensor:
        return torch.arange(num_ranks, device=expert_ids.device).repeat(len(expert_ids), 1)
