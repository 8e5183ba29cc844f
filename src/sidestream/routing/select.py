"""Choosing experts: stable top-k, limited to groups, or evenly by force.

No host reads, and the number of operators does not depend on the number of experts or of routes.

Legend: T tokens, E experts, K routes per token, G groups of E / G neighbouring experts.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def top_k_stable(scores: Tensor, k: int) -> Tensor:
    """Ids of the k largest scores per row, ties to the lowest id, on every device and for every batch size.

    `torch.topk` breaks ties by accident of its kernel. A stable descending sort does not, and the number of
    operators does not depend on k.

    Args:
        scores: `[T, E]`.
        k: At most E.

    Returns:
        `[T, k]` int64.
    """
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :k]


def keep_top_groups(scores: Tensor, *, top_k: int, num_groups: int, top_groups: int) -> Tensor:
    """Set the scores outside each token's best groups to -inf.

    A group's score is the sum of its `top_k / top_groups` best experts (DeepSeek-V3). With one group per rank or
    per node a token visits at most `top_groups` of them.

    Args:
        scores: `[T, E]`, with the selection bias.
        top_k: K, a multiple of `top_groups`.
        num_groups: G, divides E.
        top_groups: Groups a token may use.

    Returns:
        `[T, E]`.
    """
    grouped = scores.view(scores.shape[0], num_groups, scores.shape[1] // num_groups)
    best = torch.sort(grouped, dim=-1, descending=True).values[..., : top_k // top_groups]
    chosen = top_k_stable(best.sum(dim=-1), top_groups)
    keep = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(1, chosen, True)
    return torch.where(keep.unsqueeze(-1), grouped, -torch.inf).view_as(scores)


def balanced_ids(
    num_tokens: int,
    *,
    top_k: int,
    num_experts: int,
    valid: Tensor | None,
    device: torch.device,
    first: Tensor | int = 0,
) -> Tensor:
    """A choice that loads all experts equally whatever the scores are: `[T, K]` int64.

    The experts are dealt out one after another, in steps that are coprime to E, so a token's K experts differ and
    lie far apart. Every expert gets exactly `T * K / E` routes where that is a whole number, else one more or less;
    so it is for several calls together, where each goes on with the number at which the last one ended.

    Args:
        num_tokens: T.
        top_k: K, at most E.
        num_experts: E.
        valid: `[T]` bool, False on padding, which is skipped in dealing.
        device: Where the result lies.
        first: Number of the first token in the deal, scalar int64.
    """
    order = (
        torch.arange(num_tokens, device=device) if valid is None else valid.long().cumsum(0) - valid.long()
    )
    dealt = (order + first).unsqueeze(1) * top_k + torch.arange(top_k, device=device)
    return dealt % num_experts * _stride(num_experts) % num_experts


def _stride(num_experts: int) -> int:
    """A number near the golden section of `num_experts`, coprime to it."""
    first = max(1, round(0.618 * num_experts))
    return next(s for s in range(first, 2 * num_experts + 2) if math.gcd(s, num_experts) == 1)
