"""Load balancing: an auxiliary loss, a bias on the choice, or nothing. `quantile.py` has one more bias.

    loss, observe    during the attempt, per layer and micro-batch; their sums live in the ledger
    global_loss      during the attempt, when the counts of the whole global batch are known
    commit           after the check; only this changes anything that lasts

Legend: T tokens, E experts, K routes per token, B sequences, L MoE layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from sidestream.routing.router import Decision, count_routes


class Balance:
    """Keeps the experts evenly loaded. This base does nothing; subclasses override what they need.

    Args:
        z_loss_coefficient: Weight of the router z-loss (Zoph et al. 2022) in the total loss, which keeps the logits
            small: `logsumexp(logits)^2`, mean over all valid tokens of the global batch, summed over layers.

    Attributes:
        uses_bias: The router adds `MoE.selection_bias` to what it ranks.
        coefficient: Weight of the auxiliary loss in the total loss.
        needs_global_counts: Its loss is `global_loss`, not `loss`.
        observes: It has an `observe`.
    """

    uses_bias = False
    coefficient = 0.0
    needs_global_counts = False
    observes = False

    def __init__(self, *, z_loss_coefficient: float = 0.0) -> None:
        self.z_loss_coefficient = z_loss_coefficient

    def loss(self, decision: Decision, *, seq_length: int) -> Tensor | None:
        """Return the auxiliary loss of one layer, from the tokens of a micro-batch.

        Args:
            decision: The local tokens' routing; T = B * seq_length, sequence-major.
            seq_length: Tokens per sequence.

        Returns:
            Scalar fp32: the loss times the number of local sequences B, so that the sum over ranks and micro-batches
            divided by the sequences of the global batch is the mean; None if there is none.
        """
        return None

    def global_loss(self, probs: Tensor, counts: Tensor, *, num_tokens: Tensor, top_k: int) -> Tensor:
        """This micro-batch's share of a loss over the global batch; shares add up to it, values and gradients.

        Args:
            probs: `[L, E]` fp32, probabilities summed over the micro-batch.
            counts: `[L, E]`, routes per expert over the global batch.
            num_tokens: Valid tokens of the global batch, scalar fp64.
            top_k: K.

        Returns:
            Scalar fp32, summed over layers.
        """
        raise NotImplementedError

    def observe(self, decision: Decision, bias: Tensor) -> Tensor:
        """Measure a micro-batch for `commit`: `[E + 1]` fp64. Sums over micro-batches and ranks go there."""
        raise NotImplementedError

    def commit(self, bias: Tensor, counts: Tensor, observed: Tensor | None = None) -> None:
        """Update the selection bias `[E]` fp32 in place.

        Args:
            bias: The bias.
            counts: `[E]`, routes of the global batch.
            observed: `[E + 1]` fp64, the sum of what `observe` returned; None without it.
        """


class NoBalance(Balance):
    """No balancing."""


def switch_loss(probs: Tensor, counts: Tensor, *, num_tokens: Tensor | int, top_k: int) -> Tensor:
    """`E * sum_e f_e P_e` (Fedus et al. 2021, extended to top-k); exactly 1.0 under perfect balance for every K.

    Linear in `probs`: summed probabilities of a part of the tokens give that part's share of the loss.

    Args:
        probs: `[..., E]` fp32, probabilities summed over the tokens.
        counts: `[..., E]`, routes per expert over all `num_tokens`.
        num_tokens: Tokens the counts were taken over; a tensor is `[]` or `[..., 1]`, of integers or fp64.
        top_k: Routes per token.

    Returns:
        `[...]` fp32.
    """
    # Counts of a large step do not fit into fp32, which holds integers up to 2^24 only.
    tokens = num_tokens.double() if isinstance(num_tokens, Tensor) else num_tokens
    fraction = (counts.double() / (tokens * top_k)).float()
    share = probs / (tokens.float() if isinstance(tokens, Tensor) else tokens)
    return probs.shape[-1] * (fraction * share).sum(dim=-1)


class AuxLoss(Balance):
    """The Switch auxiliary loss. Routes are counted before any is dropped, without padding.

    Args:
        coefficient: Weight in the total loss.
        scope: Which tokens f_e and P_e are taken over. `sequence`: each sequence on its own (DeepSeek-V2), the same
            number however the batch is cut over ranks and micro-batches. `micro_batch`: the tokens of one rank's
            micro-batch. `global`: those of the whole step (Qiu et al. 2025, arXiv 2501.11873), exactly, also under
            accumulation; what that costs is in `TrainingStep`.
        z_loss_coefficient: See `Balance`.
    """

    def __init__(
        self,
        *,
        coefficient: float,
        scope: Literal["sequence", "micro_batch", "global"] = "sequence",
        z_loss_coefficient: float = 0.0,
    ) -> None:
        super().__init__(z_loss_coefficient=z_loss_coefficient)
        self.needs_global_counts = scope == "global"
        if scope not in _LOCAL_SCOPES and not self.needs_global_counts:
            raise ValueError(f"balance.scope={scope}: expected one of {', '.join(_LOCAL_SCOPES)}, global")
        self.coefficient, self.scope = coefficient, scope

    def loss(self, decision: Decision, *, seq_length: int) -> Tensor | None:
        return _LOCAL_SCOPES[self.scope](decision, seq_length)

    def global_loss(self, probs: Tensor, counts: Tensor, *, num_tokens: Tensor, top_k: int) -> Tensor:
        return switch_loss(probs, counts, num_tokens=num_tokens, top_k=top_k).sum()


def _num_tokens(decision: Decision, groups: int) -> Tensor | int:
    """Valid tokens of each of `groups` equal parts: `[G, 1]` int64, at least 1, or a number if there is no padding."""
    if decision.valid is None:
        return decision.probs.shape[0] // groups
    return decision.valid.view(groups, -1).sum(dim=1, keepdim=True).clamp(min=1)


def _sequence_scope(decision: Decision, seq_length: int) -> Tensor:
    num_tokens, num_experts = decision.probs.shape
    sequences, top_k = num_tokens // seq_length, decision.ids.shape[1]
    counts_BE = count_routes(decision.ids.reshape(sequences, -1), num_experts)
    probs_BE = decision.probs.view(sequences, seq_length, num_experts).sum(dim=1)
    return switch_loss(probs_BE, counts_BE, num_tokens=_num_tokens(decision, sequences), top_k=top_k).sum()


def _micro_batch_scope(decision: Decision, seq_length: int) -> Tensor:
    num_tokens, top_k = decision.ids.shape
    valid = _num_tokens(decision, 1)
    loss = switch_loss(decision.probs.sum(0, keepdim=True), decision.counts, num_tokens=valid, top_k=top_k)
    return loss.sum() * (num_tokens // seq_length)


_LOCAL_SCOPES: dict[str, Callable[[Decision, int], Tensor]] = {
    "sequence": _sequence_scope,
    "micro_batch": _micro_batch_scope,
}


class ExpertBias(Balance):
    """Balancing without a loss (Wang et al. 2024, arXiv 2408.15664): `bias += rate * sign(mean - count)` per step.

    The bias moves the choice only; weights come from the unbiased scores. It is fp32 whatever the model's dtype.
    """

    uses_bias = True

    def __init__(self, *, update_rate: float, z_loss_coefficient: float = 0.0) -> None:
        super().__init__(z_loss_coefficient=z_loss_coefficient)
        self.update_rate = update_rate

    def commit(self, bias: Tensor, counts: Tensor, observed: Tensor | None = None) -> None:
        # In integers: the mean of counts, or a large count itself, may not be a number of fp32.
        counts = counts.to(torch.int64)
        below_mean = torch.sign(counts.sum() - counts * counts.numel())
        bias.add_(below_mean.to(bias.dtype), alpha=self.update_rate)
