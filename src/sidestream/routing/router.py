"""Routers: logits -> `Routing`.

    scores   = softmax | sigmoid | sqrt_softplus        one subclass each
    ids      = top-k of scores or logits, + bias, within groups
    weights  = scores of the chosen, shared out, scaled
    routing  = what expert capacity leaves of it

Legend: T tokens, K routes per token, H features, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from sidestream.dispatch.base import Routing
from sidestream.routing import scores as score_functions
from sidestream.routing.capacity import DropPolicy, drop_over_capacity, expert_capacity, pad_to_capacity
from sidestream.routing.select import balanced_ids, keep_top_groups, top_k_stable


@dataclass(frozen=True)
class Decision:
    """A routing together with what balancing needs.

    Attributes:
        routing: Expert ids and weights, as they are dispatched.
        probs: `[T, E]` fp32, scores over all experts, rows sum to 1, differentiable; zero on padding.
        counts: `[E]` int64, routes per expert of the local tokens, before any is dropped.
        valid: `[T]` bool, False on padding; None: no padding.
        chosen: `[T, K]` int64, ids before any is dropped; None: those of `routing`.
        ranking: `[T, E]` fp32, what was ranked, without bias and gradient; None from a router that does not say.
        dropped: Routes over capacity, scalar int64 on the device; None: nothing can be dropped.
    """

    routing: Routing
    probs: Tensor
    counts: Tensor
    valid: Tensor | None = None
    chosen: Tensor | None = None
    ranking: Tensor | None = None
    dropped: Tensor | None = None

    @property
    def ids(self) -> Tensor:
        """`[T, K]` int64, before any is dropped; what balancing counts."""
        return self.routing.expert_ids if self.chosen is None else self.chosen


def joined(decisions: Sequence[Decision]) -> Decision:
    """Decisions for consecutive tokens, as one; without the routes of padding that fill experts up."""

    def cat(parts: Iterable[Tensor | None]) -> Tensor | None:
        present = [part for part in parts if part is not None]
        return torch.cat(present) if present else None

    routings = [d.routing for d in decisions]
    dropped = [d.dropped for d in decisions if d.dropped is not None]
    return Decision(
        Routing(torch.cat([r.expert_ids for r in routings]), torch.cat([r.weights for r in routings])),
        probs=torch.cat([d.probs for d in decisions]),
        counts=torch.stack([d.counts for d in decisions]).sum(0),
        valid=cat(d.valid for d in decisions),
        chosen=cat(d.chosen for d in decisions),
        ranking=cat(d.ranking for d in decisions),
        dropped=torch.stack(dropped).sum() if dropped else None,
    )


@dataclass(frozen=True)
class Routed:
    """Tokens with the router's decision for them.

    Attributes:
        x_TH: `[T, H]`, what the routed experts read.
        decision: For these tokens.
        logits_TE: `[T, E]` fp32.
        seq_length: Tokens per sequence.
    """

    x_TH: Tensor
    decision: Decision
    logits_TE: Tensor
    seq_length: int

    @staticmethod
    def joined(parts: Sequence[Routed]) -> Routed:
        """One after another, as if they had been routed together."""
        return Routed(
            torch.cat([part.x_TH for part in parts]),
            joined([part.decision for part in parts]),
            torch.cat([part.logits_TE for part in parts]),
            parts[0].seq_length,
        )

    def chunks(self, num_chunks: int) -> list[Routed]:
        """Cut the tokens, and the routes of padding behind them, into chunks of nearly equal size."""
        routing = self.decision.routing
        extra = routing.expert_ids.shape[0] - self.x_TH.shape[0]
        x_TH = F.pad(self.x_TH, (0, 0, 0, extra)) if extra else self.x_TH
        ids, weights = routing.expert_ids.tensor_split(num_chunks), routing.weights.tensor_split(num_chunks)
        return [
            replace(self, x_TH=x, decision=replace(self.decision, routing=Routing(i, w, routing.complete)))
            for x, i, w in zip(x_TH.tensor_split(num_chunks), ids, weights)
        ]


class Router(Protocol):
    """Pure function of the logits. The gate's weight belongs to the MoE layer.

    A router may also have `jitter`: the layer then multiplies the gate's input in training, see `scores.jitter`. One
    that numbers tokens, such as a forced choice does, takes a keyword `first`, the number of the first token that it
    is given, scalar int64: a schedule may route a batch in parts.
    """

    top_k: int

    def __call__(
        self, logits: Tensor, *, selection_bias: Tensor | None = None, valid: Tensor | None = None
    ) -> Decision: ...


class TopKRouter:
    """The k best experts of every token. Subclasses say how logits become scores.

    Args:
        top_k: Routes per token.
        normalize: Divide the chosen weights by their sum. `auto`: when top_k > 1. With top_k = 1 every weight would
            be 1 and the router would get no gradient from the language-model loss.
        score_order: `before_top_k` ranks the scores over all experts. `after_top_k` ranks the logits and scores only
            the chosen ones: softmax over K (Mixtral). Without bias and groups the other functions give the same.
        scaling_factor: Multiplies the weights, after normalisation.
        num_groups: Groups of neighbouring experts; None: no limit.
        top_groups: Groups a token may use.
        jitter: The gate's input is multiplied by `U(1 - jitter, 1 + jitter)` in training.
        expert_capacity_factor: An expert takes `ceil(T * K * factor / E)` of the local routes; None: all of them.
        drop_policy: Which routes it keeps, see `drop_over_capacity`. Kept weights are not renormalised.
        pad_to_capacity: Every expert gets exactly its capacity from every rank, see `pad_to_capacity`.
        force_balance: For benchmarks: the choice is made, thrown away, and replaced by an even one. The weights are
            still the router's scores, of the forced experts, so the gate gets its gradient through them.
    """

    score: Callable[[Tensor], Tensor]
    sums_to_one = False  # over whatever experts are scored

    def __init__(
        self,
        *,
        top_k: int,
        normalize: bool | Literal["auto"] = "auto",
        score_order: Literal["before_top_k", "after_top_k"] = "before_top_k",
        scaling_factor: float = 1.0,
        num_groups: int | None = None,
        top_groups: int | None = None,
        jitter: float = 0.0,
        expert_capacity_factor: float | None = None,
        drop_policy: DropPolicy = "probs",
        pad_to_capacity: bool = False,
        force_balance: bool = False,
    ) -> None:
        self.top_k, self.scaling_factor, self.jitter = top_k, scaling_factor, jitter
        self.scores_chosen = score_order == "after_top_k"
        are_shares = self.sums_to_one and self.scores_chosen
        self.normalize = top_k > 1 and not are_shares if normalize == "auto" else bool(normalize)
        if top_k == 1 and (self.normalize or are_shares):
            key, fix = (
                ("score_order=after_top_k", "score_order=before_top_k")
                if are_shares
                else (
                    "normalize=true",
                    "normalize=auto",
                )
            )
            raise ValueError(
                f"router.{key}: with router.top_k=1 every weight is 1 and the router is not trained; "
                f"expected top_k > 1; set router.{fix}"
            )
        self.num_groups, self.top_groups = num_groups, top_groups
        self.expert_capacity_factor, self.drop_policy = expert_capacity_factor, drop_policy
        self.pad_to_capacity, self.force_balance = pad_to_capacity, force_balance

    def __call__(
        self,
        logits: Tensor,
        *,
        selection_bias: Tensor | None = None,
        valid: Tensor | None = None,
        first: Tensor | int = 0,
    ) -> Decision:
        """Route.

        Args:
            logits: `[T, E]` fp32.
            selection_bias: `[E]` fp32, added for the choice only; weights stay unbiased.
            valid: `[T]` bool, False on padding, which gets no route and no weight.
            first: Number of the first token among all that the experts are dealt out to by `force_balance`.

        Returns:
            The decision; ids of valid tokens are `-1 < id < E` also where the logits are not finite.
        """
        assert logits.dtype == torch.float32, f"router logits must be fp32, got {logits.dtype}"
        scores = self.score(logits)
        ranking = (logits if self.scores_chosen else scores).detach()
        ids = self._choose(ranking, selection_bias, valid, first)
        weights = self.score(logits.gather(1, ids)) if self.scores_chosen else scores.gather(1, ids)
        if self.normalize:
            weights = score_functions.share(weights)
        if self.scaling_factor != 1.0:
            weights = weights * self.scaling_factor
        probs = scores if self.sums_to_one else score_functions.share(scores)
        if valid is not None:
            ids = torch.where(valid.unsqueeze(1), ids, -1)
            probs = torch.where(valid.unsqueeze(1), probs, 0.0)
        counts = count_routes(ids.unsqueeze(0), logits.shape[1]).squeeze(0)
        routing, dropped = Routing(ids, weights, complete=valid is None), None
        if self.expert_capacity_factor is not None:
            routing, dropped = self._limit(routing, counts, self.expert_capacity_factor)
        return Decision(routing, probs, counts, valid, ids, ranking, dropped)

    def _choose(
        self, ranking: Tensor, bias: Tensor | None, valid: Tensor | None, first: Tensor | int
    ) -> Tensor:
        biased = ranking if bias is None else ranking + bias
        if self.num_groups is not None:
            assert self.top_groups is not None
            biased = keep_top_groups(
                biased, top_k=self.top_k, num_groups=self.num_groups, top_groups=self.top_groups
            )
        ids = top_k_stable(biased, self.top_k)
        if self.force_balance:
            num_tokens, num_experts = ranking.shape
            return balanced_ids(
                num_tokens,
                top_k=self.top_k,
                num_experts=num_experts,
                valid=valid,
                device=ids.device,
                first=first,
            )
        return ids

    def _limit(self, routing: Routing, counts: Tensor, factor: float) -> tuple[Routing, Tensor]:
        num_tokens, num_experts = routing.expert_ids.shape[0], counts.numel()
        capacity = expert_capacity(num_tokens, top_k=self.top_k, num_experts=num_experts, factor=factor)
        ids, dropped = drop_over_capacity(
            routing.expert_ids,
            routing.weights,
            capacity=capacity,
            num_experts=num_experts,
            policy=self.drop_policy,
        )
        kept = Routing(ids, routing.weights)
        return pad_to_capacity(kept, counts, capacity=capacity) if self.pad_to_capacity else kept, dropped


class SoftmaxRouter(TopKRouter):
    """Softmax over all experts (OLMoE, Qwen3), or over the chosen ones (Mixtral)."""

    score = staticmethod(score_functions.softmax)
    sums_to_one = True


class SigmoidRouter(TopKRouter):
    """Experts do not compete for a score (DeepSeek-V3)."""

    score = staticmethod(score_functions.sigmoid)


class SqrtSoftplusRouter(TopKRouter):
    """`sqrt(softplus(logit))`: like sigmoid, without an upper bound."""

    score = staticmethod(score_functions.sqrt_softplus)


def count_routes(ids: Tensor, num_experts: int) -> Tensor:
    """Routes per expert of each group of tokens: ids `[G, ...]` int64, -1 = none -> `[G, E]` int64."""
    flat = ids.reshape(ids.shape[0], -1)
    counts = torch.zeros(ids.shape[0], num_experts + 1, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(1, torch.where(flat < 0, num_experts, flat), torch.ones_like(flat))
    return counts[:, :num_experts]
