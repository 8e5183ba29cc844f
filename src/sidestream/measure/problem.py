"""What every arm is given: weights, tokens, and the fp32 reference it must agree with before it is timed.

Every arm routes for itself from the same gate. Routers differ in precision (some round logits, or probabilities too,
to bf16), so only tokens are drawn whose choice no such rounding can turn. All arms then make the same decision.

Legend: T tokens of this rank, D features, F expert width, E experts in total, L local experts, K routes per token.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from sidestream.measure.shapes import LayerShape

LOGIT_STD = 1.28
_BF16_STEP = 2.0**-7  # relative distance of neighbours, at most


@dataclass(frozen=True)
class Weights:
    """The layer's weights over all experts, the same on every rank. All values can be written in bf16.

    Attributes:
        gate: `[E, D]` fp32.
        w_gate_up: `[E, D, 2F]`, gate then up, in the dtype of the run.
        w_down: `[E, F, D]`, in the dtype of the run.
        expert_range: First and past-the-last expert of this rank.
    """

    gate: Tensor
    w_gate_up: Tensor
    w_down: Tensor
    expert_range: tuple[int, int]

    @property
    def local(self) -> tuple[Tensor, Tensor]:
        """This rank's share of `w_gate_up` and `w_down`."""
        mine = slice(*self.expert_range)
        return self.w_gate_up[mine], self.w_down[mine]


def make_weights(
    shape: LayerShape,
    *,
    dtype: torch.dtype,
    seed: int,
    skew: float,
    skew_order: str,
    rank: int,
    world_size: int,
) -> Weights:
    """Draw weights. Feature 0 of every token is 1, and column 0 of the gate carries the skew.

    Args:
        skew: s of `logits = 1.28 * N(0, 1) - s * log(popularity rank of the expert)`, about Zipf(s).
        skew_order: `contiguous`: expert 0 is the most popular one, so rank 0 gets most rows; `shuffled`: any order.
    """
    generator = torch.Generator().manual_seed(seed)
    experts, hidden, width = shape.num_experts, shape.hidden_size, shape.expert_hidden_size

    def normal(*size: int, std: float) -> Tensor:
        return torch.randn(*size, generator=generator).mul_(std).bfloat16()

    gate = normal(experts, hidden, std=LOGIT_STD / hidden**0.5).float()
    popularity = torch.arange(1, experts + 1).float()
    if skew_order == "shuffled":
        popularity = popularity[torch.randperm(experts, generator=generator)]
    gate[:, 0] = (-skew * popularity.log()).bfloat16().float()
    w_gate_up = normal(experts, hidden, 2 * width, std=hidden**-0.5).to(dtype)
    w_down = normal(experts, width, hidden, std=width**-0.5).to(dtype)
    share = experts // world_size
    return Weights(gate, w_gate_up, w_down, (rank * share, (rank + 1) * share))


def make_tokens(
    shape: LayerShape, gate: Tensor, *, dtype: torch.dtype, seed: int, draw: int, rank: int
) -> Tensor:
    """Draw `[T, D]` tokens of one round.

    Args:
        gate: `[E, D]` fp32.
        draw: Number of the draw; another number gives other tokens and another routing.
    """
    key = hashlib.sha256(f"{seed}/{draw}/{rank}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
    kept: list[Tensor] = []
    missing = shape.tokens
    for _ in range(100):
        x = torch.randn(missing + missing // 2 + 64, shape.hidden_size, generator=generator).bfloat16()
        x[:, 0] = 1.0
        good = x[_is_clear_cut(x.float() @ gate.t(), shape.top_k)][:missing]
        kept.append(good)
        missing -= good.shape[0]
        if missing == 0:
            return torch.cat(kept).to(dtype)
    raise ValueError(f"shape={shape.name}: almost no token has a choice that bf16 rounding cannot turn")


def _is_clear_cut(logits: Tensor, top_k: int) -> Tensor:
    if top_k == logits.shape[1]:
        return torch.ones(logits.shape[0], dtype=torch.bool)
    last, following = logits.topk(top_k + 1, dim=-1).values[:, -2:].unbind(1)
    # Rounded logits may come closer by one step of their size, rounded probabilities by a relative step.
    return last - following > 2 * _BF16_STEP * (1 + torch.maximum(last.abs(), following.abs()))


def make_output_gradient(shape: LayerShape, *, dtype: torch.dtype, seed: int, rank: int) -> Tensor:
    """Gradient of the layer's output, `[T, D]`, contiguous."""
    generator = torch.Generator().manual_seed(seed + 7919 * (rank + 1))
    return torch.randn(shape.tokens, shape.hidden_size, generator=generator).to(dtype)


def route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Softmax, top-k, weights divided by their sum when K > 1: ids and weights `[T, K]`."""
    weights, ids = torch.softmax(logits, dim=-1).topk(top_k, dim=-1)
    return ids, weights / weights.sum(dim=-1, keepdim=True) if top_k > 1 else weights


@dataclass(frozen=True)
class Answer:
    """Output and gradients of one forward and backward, in our layout.

    Attributes:
        output: `[T, D]`.
        grads: `x` `[T, D]`, `gate` `[E, D]` of this rank's tokens; `w_gate_up` `[L, D, 2F]`, `w_down` `[L, F, D]` of
            all ranks' tokens.
    """

    output: Tensor
    grads: dict[str, Tensor]


def reference(shape: LayerShape, weights: Weights, x: Tensor, output_gradient: Tensor) -> Answer:
    """The layer in fp32, one expert after another, every expert on every rank. Collective."""
    x = x.detach().float().requires_grad_()
    gate = weights.gate.clone().requires_grad_()
    w_gate_up = weights.w_gate_up.float().requires_grad_()
    w_down = weights.w_down.float().requires_grad_()
    ids, route_weights = route(x @ gate.t(), shape.top_k)
    output = torch.zeros_like(x)
    for expert, (gate_up, down) in enumerate(zip(w_gate_up.unbind(0), w_down.unbind(0))):
        token, slot = torch.where(ids == expert)
        gate_half, up_half = (x[token] @ gate_up).chunk(2, dim=-1)
        rows = F.silu(gate_half) * up_half * route_weights[token, slot].unsqueeze(-1)
        output = output.index_add(0, token, rows @ down)
    output.backward(output_gradient.float())
    grads = {"x": x.grad, "gate": gate.grad}
    for name, weight in (("w_gate_up", w_gate_up), ("w_down", w_down)):
        if dist.is_initialized():
            dist.all_reduce(weight.grad)
        assert weight.grad is not None
        grads[name] = weight.grad[slice(*weights.expert_range)].clone()
    return Answer(output.detach(), grads)  # type: ignore[arg-type]


def describe_routing(
    shape: LayerShape, gate: Tensor, x: Tensor, *, world_size: int
) -> dict[str, float | str]:
    """Load over all ranks and a hash of the decision. Collective.

    Returns:
        `expert_max_over_mean`, `rank_max_over_mean`: of the routes. `rows_per_token_and_rank`: routes divided by
        distinct (token, rank) pairs; above 1 a dispatcher that sends a token once per rank saves bytes. `hash`.
    """
    ids, _ = route(x.float() @ gate.t(), shape.top_k)
    return describe_ids(shape, ids, world_size=world_size)


def describe_ids(shape: LayerShape, ids: Tensor, *, world_size: int) -> dict[str, float | str]:
    """See `describe_routing`, for expert ids `[T, K]` of which none is missing. Collective."""
    ids = ids.sort(dim=-1).values
    counts = torch.bincount(ids.reshape(-1), minlength=shape.num_experts)
    ranks_of_routes = ids // (shape.num_experts // world_size)
    pairs = torch.stack([(ranks_of_routes == rank).any(dim=-1).sum() for rank in range(world_size)]).sum()
    digest = hashlib.sha256(ids.numpy().tobytes()).digest()
    summed = torch.cat([counts, pairs.reshape(1), torch.tensor([int.from_bytes(digest[:6], "big")])])
    if dist.is_initialized():
        dist.all_reduce(summed)
    loads = summed[: shape.num_experts].double()
    per_rank = loads.view(world_size, -1).sum(dim=1)
    return {
        "expert_max_over_mean": float(loads.max() / loads.mean()),
        "rank_max_over_mean": float(per_rank.max() / per_rank.mean()),
        "rows_per_token_and_rank": float(loads.sum() / summed[-2]),
        "hash": f"{int(summed[-1]):x}",
    }
