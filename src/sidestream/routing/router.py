"""Routers: hidden states -> `Routing`.

Legend: T tokens, K routes per token, H features, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from sidestream.dispatch.base import Routing


@dataclass(frozen=True)
class Decision:
    """A routing together with what balancing needs.

    Attributes:
        routing: Expert ids and weights.
        probs: `[T, E]` fp32, scores over all experts, differentiable; zero on padding.
        counts: `[E]` int64, routes per expert of the local tokens.
        valid: `[T]` bool, False on padding; None: no padding.
    """

    routing: Routing
    probs: Tensor
    counts: Tensor
    valid: Tensor | None = None


class Router(Protocol):
    """Pure function of the logits. The gate's weight belongs to the MoE layer."""

    top_k: int

    def __call__(
        self, logits: Tensor, *, selection_bias: Tensor | None = None, valid: Tensor | None = None
    ) -> Decision: ...


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


class SoftmaxRouter:
    """Softmax over all experts in fp32, then top-k (Shazeer et al. 2017; the order of Mixtral and OLMoE).

    Args:
        top_k: Routes per token.
        normalize: Divide the chosen weights by their sum. `auto`: when top_k > 1. With top_k = 1 every weight would
            be 1 and the router would get no gradient from the language-model loss.
    """

    def __init__(self, *, top_k: int, normalize: bool | Literal["auto"] = "auto") -> None:
        self.top_k = top_k
        self.normalize = top_k > 1 if normalize == "auto" else bool(normalize)
        if self.normalize and top_k == 1:
            raise ValueError(
                "router.normalize=true: with router.top_k=1 every weight is 1 and the router is not trained; "
                "expected top_k > 1; set router.normalize=auto"
            )

    def __call__(
        self, logits: Tensor, *, selection_bias: Tensor | None = None, valid: Tensor | None = None
    ) -> Decision:
        """Route.

        Args:
            logits: `[T, E]` fp32.
            selection_bias: `[E]` fp32, added for the choice only; weights stay unbiased.
            valid: `[T]` bool, False on padding, which gets no route and no weight.

        Returns:
            The decision; ids of valid tokens are `-1 < id < E` also where the logits are not finite.
        """
        assert logits.dtype == torch.float32, f"router logits must be fp32, got {logits.dtype}"
        probs = torch.softmax(logits, dim=-1)
        scores = probs.detach()
        ids = top_k_stable(scores if selection_bias is None else scores + selection_bias, self.top_k)
        weights = probs.gather(1, ids)
        if self.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        complete = valid is None
        if valid is not None:
            ids = torch.where(valid.unsqueeze(1), ids, -1)
            probs = torch.where(valid.unsqueeze(1), probs, 0.0)
        counts = count_routes(ids.unsqueeze(0), logits.shape[1]).squeeze(0)
        return Decision(Routing(ids, weights, complete=complete), probs, counts, valid)


def count_routes(ids: Tensor, num_experts: int) -> Tensor:
    """Routes per expert of each group of tokens: ids `[G, ...]` int64, -1 = none -> `[G, E]` int64."""
    flat = ids.reshape(ids.shape[0], -1)
    counts = torch.zeros(ids.shape[0], num_experts + 1, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(1, torch.where(flat < 0, num_experts, flat), torch.ones_like(flat))
    return counts[:, :num_experts]
