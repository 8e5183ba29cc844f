"""Quantile balancing: a bias that is computed, not stepped (Megatron-Core PR 5349).

A token chooses the k experts with the largest `score - beta`. With alpha its (k+1)-th largest value, expert e is
chosen by the tokens with `score_e - alpha > beta_e`. So the beta that gives e its even load of `T * k / E` tokens is
the value of `score_e - alpha` that so many tokens exceed: a quantile.

Legend: T tokens, E experts, K routes per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sidestream.routing.balance import Balance
from sidestream.routing.router import Decision


def load_quantile(ranking: Tensor, bias: Tensor, *, top_k: int, valid: Tensor | None) -> Tensor:
    """The `(T * k / E + 1)`-th largest `score - alpha` of every expert: `[E]` fp32.

    Args:
        ranking: `[T, E]` fp32, scores without bias.
        bias: `[E]` fp32, `-beta`.
        top_k: k < E.
        valid: `[T]` bool, False on padding; T then is the number of valid tokens, and `T * k / E` is rounded down.
            Without any valid token the result is -inf.
    """
    num_tokens, num_experts = ranking.shape
    alpha = torch.topk(ranking + bias, top_k + 1, dim=1).values[:, top_k:]
    margin = ranking - alpha
    if valid is None:
        even = torch.full((), num_tokens * top_k // num_experts, dtype=torch.int64, device=bias.device)
    else:
        margin = torch.where(valid.unsqueeze(1), margin, -torch.inf)
        even = torch.div(valid.sum() * top_k, num_experts, rounding_mode="floor")
    largest_first = torch.sort(margin, dim=0, descending=True).values
    return largest_first.index_select(0, even.clamp(max=num_tokens - 1).view(1)).squeeze(0)


class QuantileBalance(Balance):
    """`beta = ema * beta + (1 - ema) * quantile`, the mean over micro-batches and ranks, centred on 0; bias = -beta.

    Every micro-batch gives one estimate from its own tokens, so the average depends a little on how the batch is cut.

    Args:
        ema: Share of the old beta that is kept.
        z_loss_coefficient: See `Balance`.
    """

    uses_bias = True
    observes = True

    def __init__(self, *, ema: float, z_loss_coefficient: float = 0.0) -> None:
        super().__init__(z_loss_coefficient=z_loss_coefficient)
        self.ema = ema

    def observe(self, decision: Decision, bias: Tensor) -> Tensor:
        """`[E]` quantiles and the number of estimates: 1, or 0 if all tokens are padding."""
        if decision.ranking is None:
            raise ValueError(
                "balance=quantile: the router's Decision has no ranking; set it, or another balance"
            )
        quantile = load_quantile(
            decision.ranking, bias, top_k=decision.ids.shape[1], valid=decision.valid
        ).double()
        found = (
            torch.ones_like(quantile[:1]) if decision.valid is None else decision.valid.any().double().view(1)
        )
        return torch.cat([torch.where(found > 0, quantile, 0.0), found])

    def commit(self, bias: Tensor, counts: Tensor, observed: Tensor | None = None) -> None:
        assert observed is not None, "quantile balancing observes"
        estimates = observed[-1]
        quantile = (observed[:-1] / estimates.clamp(min=1)).to(torch.float32)
        new = self.ema * bias - (1.0 - self.ema) * quantile
        # In place and without a host read: a batch of padding alone changes nothing.
        bias.copy_(torch.where(estimates > 0, new - new.mean(), bias))
