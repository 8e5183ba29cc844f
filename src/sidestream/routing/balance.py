"""Load balancing: an auxiliary loss, a bias on the choice, or nothing.

Two hooks: `loss` during the attempt (differentiable), `commit` after the check, with the counts of the whole global
batch. Only `commit` changes anything that lasts.

Legend: T tokens, E experts, K routes per token, B sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor

from sidestream.routing.router import Decision, count_routes

AllReduce = Callable[[Tensor], Tensor]


class Balance(Protocol):
    """Keeps the experts evenly loaded."""

    uses_bias: bool
    coefficient: float

    def loss(self, decision: Decision, *, seq_length: int, reduce: AllReduce | None) -> Tensor | None:
        """Return the auxiliary loss summed so that its mean over a batch is independent of how the batch is cut.

        Args:
            decision: The local tokens' routing; T = B * seq_length, sequence-major.
            seq_length: Tokens per sequence.
            reduce: SUM over all ranks that hold tokens; None on one rank.

        Returns:
            Scalar fp32: the loss times the number of local sequences B; None if there is none.
        """
        ...

    def commit(self, bias: Tensor, counts: Tensor) -> None:
        """Update the selection bias `[E]` fp32 in place from the global batch's counts `[E]`."""
        ...


def switch_loss(probs: Tensor, counts: Tensor, *, num_tokens: Tensor | int, top_k: int) -> Tensor:
    """`E * sum_e f_e P_e` (Fedus et al. 2021, extended to top-k); exactly 1.0 under perfect balance for every K.

    Args:
        probs: `[..., E]` fp32, probabilities summed over the tokens.
        counts: `[..., E]`, routes per expert over the same tokens.
        num_tokens: Tokens in the sums.
        top_k: Routes per token.

    Returns:
        `[...]` fp32.
    """
    fraction = counts.to(torch.float32) / (num_tokens * top_k)
    return probs.shape[-1] * (fraction * (probs / num_tokens)).sum(dim=-1)


class AuxLoss:
    """The Switch auxiliary loss.

    Args:
        coefficient: Weight in the total loss.
        scope: Which tokens f_e and P_e are taken over. `sequence`: each sequence on its own (DeepSeek-V2), the same
            number however the batch is cut over ranks and micro-batches. `micro_batch`: the tokens of one rank's
            micro-batch. `global`: that of all ranks, one more small all-reduce per layer.
    """

    uses_bias = False

    def __init__(
        self, *, coefficient: float, scope: Literal["sequence", "micro_batch", "global"] = "sequence"
    ) -> None:
        if scope not in _SCOPES:
            raise ValueError(f"balance.scope={scope}: expected one of {', '.join(_SCOPES)}")
        self.coefficient, self.scope = coefficient, scope

    def loss(self, decision: Decision, *, seq_length: int, reduce: AllReduce | None) -> Tensor | None:
        return _SCOPES[self.scope](decision, seq_length, reduce)

    def commit(self, bias: Tensor, counts: Tensor) -> None:
        return None


def _num_tokens(decision: Decision, groups: int) -> Tensor | int:
    """Valid tokens of each of `groups` equal parts: `[G, 1]` fp32, at least 1, or a number if there is no padding."""
    if decision.valid is None:
        return decision.probs.shape[0] // groups
    return decision.valid.view(groups, -1).sum(dim=1, keepdim=True).clamp(min=1).to(torch.float32)


def _sequence_scope(decision: Decision, seq_length: int, reduce: AllReduce | None) -> Tensor:
    num_tokens, num_experts = decision.probs.shape
    sequences, top_k = num_tokens // seq_length, decision.routing.expert_ids.shape[1]
    counts_BE = count_routes(decision.routing.expert_ids.reshape(sequences, -1), num_experts)
    probs_BE = decision.probs.view(sequences, seq_length, num_experts).sum(dim=1)
    return switch_loss(probs_BE, counts_BE, num_tokens=_num_tokens(decision, sequences), top_k=top_k).sum()


def _micro_batch_scope(decision: Decision, seq_length: int, reduce: AllReduce | None) -> Tensor:
    num_tokens, top_k = decision.routing.expert_ids.shape
    valid = _num_tokens(decision, 1)
    loss = switch_loss(decision.probs.sum(0, keepdim=True), decision.counts, num_tokens=valid, top_k=top_k)
    return loss.sum() * (num_tokens // seq_length)


def _global_scope(decision: Decision, seq_length: int, reduce: AllReduce | None) -> Tensor:
    if reduce is None:
        return _micro_batch_scope(decision, seq_length, None)
    num_tokens, top_k = decision.routing.expert_ids.shape
    probs, counts = decision.probs.sum(0), decision.counts
    valid = num_tokens if decision.valid is None else decision.valid.sum()
    header = torch.stack([probs.new_full((), num_tokens // seq_length), probs.new_ones(()) * valid])
    packed = reduce(torch.cat([header, counts.to(torch.float32), probs.detach()]))
    sequences, total = packed[0], packed[1].clamp(min=1)
    # The fractions and the other ranks' probabilities are constants; the gradient flows through the local ones.
    probs = probs + (packed[2 + counts.numel() :] - probs.detach())
    loss = switch_loss(probs, packed[2 : 2 + counts.numel()], num_tokens=total, top_k=top_k)
    # Every rank holds the whole loss: its value counts in proportion to the rank's share, its gradient in full,
    # because no other rank has the gradient of these probabilities (case a6).
    return loss.detach() * (num_tokens // seq_length) + (loss - loss.detach()) * sequences


_SCOPES: dict[str, Callable[[Decision, int, AllReduce | None], Tensor]] = {
    "sequence": _sequence_scope,
    "micro_batch": _micro_batch_scope,
    "global": _global_scope,
}


class ExpertBias:
    """Balancing without a loss (Wang et al. 2024, arXiv 2408.15664): `bias += rate * sign(mean - count)` per step.

    The bias moves the choice only; weights come from the unbiased scores. It is fp32 whatever the model's dtype.
    """

    uses_bias = True
    coefficient = 0.0

    def __init__(self, *, update_rate: float) -> None:
        self.update_rate = update_rate

    def loss(self, decision: Decision, *, seq_length: int, reduce: AllReduce | None) -> Tensor | None:
        return None

    def commit(self, bias: Tensor, counts: Tensor) -> None:
        counts = counts.to(torch.float32)
        bias.add_(torch.sign(counts.mean() - counts), alpha=self.update_rate)


class NoBalance:
    """No balancing."""

    uses_bias = False
    coefficient = 0.0

    def loss(self, decision: Decision, *, seq_length: int, reduce: AllReduce | None) -> Tensor | None:
        return None

    def commit(self, bias: Tensor, counts: Tensor) -> None:
        return None
