"""Expert capacity of the classic baselines (GShard, Switch): an expert takes so many routes, the rest is dropped.

No host reads; every shape follows from T, K, E and the factor.

Legend: T tokens, K routes per token, E experts, C capacity.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from sidestream.dispatch.base import Routing

DropPolicy = Literal["probs", "position"]


def expert_capacity(num_tokens: int, *, top_k: int, num_experts: int, factor: float) -> int:
    """`ceil(T * K * factor / E)` of the local tokens; exact for a factor like 1.1 that fp64 cannot hold."""
    return math.ceil(Fraction(str(factor)) * num_tokens * top_k / num_experts)


def drop_over_capacity(
    ids: Tensor, weights: Tensor, *, capacity: int, num_experts: int, policy: DropPolicy
) -> tuple[Tensor, Tensor]:
    """Take routes from experts that have more than `capacity`.

    Args:
        ids: `[T, K]` int64, -1 = no route.
        weights: `[T, K]` fp32; they only rank the routes here and are not renormalised.
        capacity: C.
        num_experts: E.
        policy: `probs`: an expert keeps its largest weights, ties to the earlier token. `position`: its first tokens.

    Returns:
        Ids with -1 in place of dropped routes; the number of dropped routes, scalar int64 on the device.
    """
    flat = ids.reshape(-1)
    has_expert = flat >= 0
    key = torch.where(has_expert, flat, num_experts)
    if policy == "probs":
        by_weight = torch.sort(weights.detach().reshape(-1), descending=True, stable=True).indices
        order = by_weight[torch.argsort(key[by_weight], stable=True)]
    else:
        order = torch.argsort(key, stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, key, torch.ones_like(key))
    begins = counts.cumsum(0) - counts
    place_sorted = torch.arange(flat.numel(), device=ids.device) - begins[key[order]]
    place = torch.empty_like(order).scatter_(0, order, place_sorted)
    kept = has_expert & (place < capacity)
    return torch.where(kept, flat, -1).view_as(ids), (has_expert & ~kept).sum()


def pad_to_capacity(routing: Routing, counts: Tensor, *, capacity: int) -> Routing:
    """Fill every expert up to exactly `capacity` routes with routes of zero tokens behind the real ones.

    What an expert receives then has one size, whatever the router says. This holds for every dispatcher: to it they
    are routes like any other, of rows that are zero, with weight zero.

    Args:
        routing: T rows, at most C routes per expert.
        counts: `[E]` int64, routes per expert before dropping.
        capacity: C.

    Returns:
        `ceil(C * E / K)` rows more; see `Routing`.
    """
    num_experts, top_k = counts.numel(), routing.expert_ids.shape[1]
    experts = torch.arange(num_experts, device=counts.device)
    nth = torch.arange(capacity, device=counts.device).unsqueeze(1)
    spare = torch.where(nth >= counts, experts, -1).reshape(-1)
    rows = -(-spare.numel() // top_k)
    ids = spare.new_full((rows * top_k,), -1)
    ids[: spare.numel()] = spare
    ids = torch.cat([routing.expert_ids, ids.view(rows, top_k)])
    weights = torch.cat([routing.weights, routing.weights.new_zeros(rows, top_k)])
    return Routing(ids, weights)
