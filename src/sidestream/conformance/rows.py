"""Is what a dispatcher moves right? Its output and gradients against a computation that needs no exchange.

The experts of this check multiply each feature by a number of their own: `out = x * sum_k weight_k * scale[expert_k]`.
A row that goes to a wrong expert, comes back to a wrong token, or loses its weight changes the result, and every rank
can compute all of its tokens alone, whatever the shape.

Legend: T tokens of this rank, K routes per token, H features, E experts, L local experts, S expert-major slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from sidestream.dispatch.base import Dispatcher, Received, Routing

# Largest accepted |found - wanted| / |wanted|: of a whole tensor, and of the worst token of output and input gradient.
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "mxfp8": 6e-2}
TOLERANCE_OF_A_TOKEN = {"fp32": 1e-3, "bf16": 5e-2, "mxfp8": 1e-1}

Group = dist.ProcessGroup | None


@dataclass(frozen=True)
class Given:
    """What a dispatcher works on, on the device.

    Attributes:
        x: `[T, H]`.
        output_gradient: `[T, H]`.
        routing: Weights are no leaf of anybody's graph.
    """

    x: Tensor
    output_gradient: Tensor
    routing: Routing


@dataclass(frozen=True)
class Outcome:
    """Output and gradients of one forward and backward on this rank.

    Attributes:
        output: `[T, H]`.
        x: `[T, H]`, gradient of the tokens.
        weights: `[T, K]` fp32, gradient of the routing weights.
        scales: `[L, H]` fp32, gradient of this rank's experts.
        dropped: Routes of all ranks that found no room.
    """

    output: Tensor
    x: Tensor
    weights: Tensor
    scales: Tensor
    dropped: int = 0

    def tensors(self) -> dict[str, Tensor]:
        return {"output": self.output, "x": self.x, "weights": self.weights, "scales": self.scales}


def place(group: Group) -> tuple[int, int]:
    """Rank and number of ranks; without a group this rank is alone."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def _over_ranks(value: Tensor, group: Group, op: Any = dist.ReduceOp.SUM) -> Tensor:
    if group is not None:
        dist.all_reduce(value, op=op, group=group)
    return value


def make_scales(num_experts: int, hidden_size: int, device: torch.device, *, seed: int) -> Tensor:
    """`[E, H]` fp32 between 0.5 and 1.5, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return (0.5 + torch.rand(num_experts, hidden_size, generator=generator)).to(device)


def scale_rows(received: Received, scales_LH: Tensor) -> Tensor:
    """The experts: `[S, H]` in the type of the rows, rounded once. Slots past the last offset become zero."""
    offsets = received.offsets.long()
    slot = torch.arange(received.rows.shape[0], device=offsets.device)
    real = slot < offsets[-1]
    expert = torch.searchsorted(offsets, slot, right=True).clamp(max=len(scales_LH) - 1)
    # Selected, and in both directions: past the last offset may lie anything, and anything times zero need not be zero.
    rows = torch.where(real.unsqueeze(1), received.rows, 0).float()
    weights = torch.where(real, received.row_weights, 0)
    out = (rows * scales_LH[expert] * weights.unsqueeze(1)).to(received.rows.dtype)
    return torch.where(real.unsqueeze(1), out, 0)


def found_by(
    dispatcher: Dispatcher,
    given: Given,
    scales: Tensor,
    *,
    group: Group,
    layer: int = 0,
    look: Callable[[Any], None] = lambda received: None,
) -> Outcome:
    """What the dispatcher computes. Collective.

    Args:
        dispatcher: Wired.
        given: Tokens of this rank.
        scales: `[E, H]`.
        group: Ranks that share the experts.
        layer: Whose counters are used.
        look: Sees what the experts get.
    """
    rank, ranks = place(group)
    share = len(scales) // ranks
    mine = scales[rank * share : (rank + 1) * share].clone().requires_grad_()
    x, weights = given.x.detach().requires_grad_(), given.routing.weights.detach().requires_grad_()
    before = dispatcher.dropped()
    lost = 0 if before is None else int(before.sum())
    plan = dispatcher.plan(replace(given.routing, weights=weights), layer=layer)
    received = dispatcher.dispatch(x, plan).wait()
    look(received)
    output = dispatcher.combine(scale_rows(received, mine), plan).wait()
    leaves = [x, weights, mine]
    grads = torch.autograd.grad(output, leaves, given.output_gradient, allow_unused=True)
    for_x, for_weights, for_scales = (
        torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads)
    )
    dropped = dispatcher.dropped()
    total = _over_ranks(torch.tensor([0 if dropped is None else int(dropped.sum()) - lost]), group)
    return Outcome(output.detach(), for_x, for_weights, for_scales, dropped=int(total))


def wanted(given: Given, scales: Tensor, *, ids: Tensor, group: Group) -> Outcome:
    """The same in fp32 on this rank alone; only the gradient of the experts is summed over ranks. Collective.

    Args:
        ids: `[T, K]`; of the routing, or without the routes that found no room.
    """
    rank, ranks = place(group)
    x, weights = given.x.detach().float().requires_grad_(), given.routing.weights.detach().requires_grad_()
    all_scales = scales.clone().requires_grad_()
    present = ids >= 0
    factor = F.embedding_bag(
        ids.clamp(min=0), all_scales, per_sample_weights=torch.where(present, weights, 0), mode="sum"
    )
    output = x * factor
    grads = torch.autograd.grad(output, [x, weights, all_scales], given.output_gradient.float())
    total = _over_ranks(grads[2].contiguous(), group)
    share = len(scales) // ranks
    return Outcome(output.detach(), grads[0], grads[1], total[rank * share : (rank + 1) * share])


def distance(found: Outcome, other: Outcome, *, group: Group) -> dict[str, float]:
    """Relative error of each tensor and of the worst token, the largest over the ranks. Collective."""
    names, values = [], []
    for (name, got), right in zip(found.tensors().items(), other.tensors().values()):
        difference, right = got.float() - right.float(), right.float()
        names.append(name)
        values.append(difference.norm() / right.norm().clamp_min(1e-12))
        if name in ("output", "x"):
            # A token whose routes were all lost is zero on both sides.
            size = right.norm(dim=-1)
            worst = difference.new_zeros(())
            if len(size):
                size = torch.maximum(size, 1e-3 * size.mean()).clamp_min(1e-12)
                worst = (difference.norm(dim=-1) / size).max()
            names.append(f"{name}_worst_token")
            values.append(worst)
    largest = torch.stack(values).double().nan_to_num(nan=torch.inf).cpu()
    return dict(zip(names, _over_ranks(largest, group, dist.ReduceOp.MAX).tolist()))


def too_far(errors: dict[str, float], precision: str) -> str | None:
    """The first error above its tolerance, in one clause.

    Args:
        precision: `fp32`, `bf16`, or `mxfp8` for rows that travel in 8 bits.
    """
    for tensor, error in errors.items():
        limit = (TOLERANCE_OF_A_TOKEN if tensor.endswith("worst_token") else TOLERANCE)[precision]
        if not error <= limit:
            return (
                f"relative error of {tensor} is {error:.2g} against the computation without an exchange; "
                f"expected at most {limit:g} in {precision}"
            )
    return None
