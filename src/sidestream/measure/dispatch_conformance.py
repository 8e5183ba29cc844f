"""Is what a dispatcher moves right? Its output and gradients against a computation that needs no exchange.

The experts of this check multiply each feature by a number of their own: `out = x * sum_k weight_k * scale[expert_k]`.
A row that goes to a wrong expert, comes back to a wrong token, or loses its weight changes the result, and every rank
can compute all of its tokens alone, whatever the shape.

Legend: T tokens of this rank, K routes per token, H features, E experts, L local experts, S expert-major slots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from sidestream.dispatch.base import Received, Routing
from sidestream.dispatch.cap import cap_routing
from sidestream.dispatch.packed import route_counts
from sidestream.measure.dispatch_arms import DispatcherArm, Given
from sidestream.measure.shapes import LayerShape

# Largest accepted |found - wanted| / |wanted|: of a whole tensor, and of the worst token of output and input gradient.
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "mxfp8": 6e-2}
TOLERANCE_OF_A_TOKEN = {"fp32": 1e-3, "bf16": 5e-2, "mxfp8": 1e-1}


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


def make_scales(shape: LayerShape, device: torch.device, *, seed: int) -> Tensor:
    """`[E, H]` fp32 between 0.5 and 1.5, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return (0.5 + torch.rand(shape.num_experts, shape.hidden_size, generator=generator)).to(device)


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


def found_by(arm: DispatcherArm, given: Given, scales: Tensor) -> Outcome:
    """What the arm computes. Collective."""
    share, rank = arm.shape.num_experts // dist.get_world_size(), dist.get_rank()
    mine = scales[rank * share : (rank + 1) * share].clone().requires_grad_()
    x, weights = given.x.detach().requires_grad_(), given.routing.weights.detach().requires_grad_()
    dispatcher = arm.dispatcher
    dispatcher.reset_needed()
    plan = dispatcher.plan(replace(given.routing, weights=weights))
    rows = scale_rows(dispatcher.dispatch(x, plan).wait(), mine)
    output = dispatcher.combine(rows, plan).wait()
    for_x, for_weights, for_scales = torch.autograd.grad(output, [x, weights, mine], given.output_gradient)
    dropped = dispatcher.dropped()
    total = torch.tensor([0 if dropped is None else int(dropped.sum())])
    dist.all_reduce(total)
    dispatcher.reset_needed()
    return Outcome(output.detach(), for_x, for_weights, for_scales, dropped=int(total))


def wanted(given: Given, shape: LayerShape, scales: Tensor, *, ids: Tensor) -> Outcome:
    """The same in fp32 on this rank alone; only the gradient of the experts is summed over ranks. Collective.

    Args:
        ids: `[T, K]`; of the routing, or without the routes that found no room.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x, weights = given.x.detach().float().requires_grad_(), given.routing.weights.detach().requires_grad_()
    all_scales = scales.clone().requires_grad_()
    present = ids >= 0
    factor = F.embedding_bag(
        ids.clamp(min=0), all_scales, per_sample_weights=torch.where(present, weights, 0), mode="sum"
    )
    output = x * factor
    grads = torch.autograd.grad(output, [x, weights, all_scales], given.output_gradient.float())
    total = grads[2].contiguous()
    dist.all_reduce(total)
    share = shape.num_experts // world_size
    return Outcome(output.detach(), grads[0], grads[1], total[rank * share : (rank + 1) * share])


def kept_ids(routing: Routing, arm: DispatcherArm) -> Tensor:
    """`[T, K]` ids of the routes that fit the arm's budget, by the rule that all dispatchers state. Collective.

    Rows fill a rank in the order of (local expert, source rank, token): the last experts lose first.
    """
    if arm.budget is None:
        return routing.expert_ids
    world_size, rank = dist.get_world_size(), dist.get_rank()
    counts = route_counts(routing.expert_ids, arm.shape.num_experts).cpu()
    everyone = [torch.empty_like(counts) for _ in range(world_size)]
    dist.all_gather(everyone, counts)
    return cap_routing(
        routing.expert_ids.cpu(),
        torch.stack(everyone),
        rank=rank,
        num_local=arm.shape.num_experts // world_size,
        alignment=arm.alignment,
        budget=arm.budget,
    ).to(routing.expert_ids.device)


def distance(found: Outcome, other: Outcome) -> dict[str, float]:
    """Relative error of each tensor and of the worst token, the largest over the ranks. Collective."""
    names, values = [], []
    for (name, got), right in zip(found.tensors().items(), other.tensors().values()):
        difference, right = got.float() - right.float(), right.float()
        names.append(name)
        values.append(difference.norm() / right.norm().clamp_min(1e-12))
        if name in ("output", "x") and len(right):
            # A token whose routes were all lost is zero on both sides.
            size = right.norm(dim=-1)
            size = torch.maximum(size, 1e-3 * size.mean()).clamp_min(1e-12)
            names.append(f"{name}_worst_token")
            values.append((difference.norm(dim=-1) / size).max())
    largest = torch.stack(values).double().nan_to_num(nan=torch.inf).cpu()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return dict(zip(names, largest.tolist()))


def judge(name: str, errors: dict[str, float], precision: str) -> None:
    """Raise where an error is above its tolerance.

    Args:
        precision: `fp32`, `bf16`, or `mxfp8` for rows that travel in 8 bits.

    Raises:
        ValueError: On every rank.
    """
    for tensor, error in errors.items():
        limit = (TOLERANCE_OF_A_TOKEN if tensor.endswith("worst_token") else TOLERANCE)[precision]
        if not error <= limit:
            raise ValueError(
                f"{name}: relative error of {tensor} is {error:.2g} against the computation without an exchange; "
                f"expected at most {limit:g} in {precision}"
            )


def precision_of(arm: DispatcherArm, precision: str) -> str:
    """Which tolerance applies."""
    return "mxfp8" if arm.cfg.dispatcher.get("wire_dtype", "model") == "mxfp8" else precision


def check_arm(
    arm: DispatcherArm, given: Given, scales: Tensor, *, precision: str
) -> tuple[Outcome, dict[str, float]]:
    """What the arm computes, and its distance from what is right. Collective.

    Raises:
        ValueError: It is too far off, or it did not say how many routes found no room.
    """
    found = found_by(arm, given, scales)
    ids = kept_ids(given.routing, arm)
    lost = ((given.routing.expert_ids >= 0) & (ids < 0)).sum().cpu()
    dist.all_reduce(lost)
    # A library that does not say which routes it lost counts rows, padding included.
    counted = found.dropped if arm.transport == "torch" else int(lost) if found.dropped else 0
    if int(lost) != counted:
        raise ValueError(
            f"{arm.name}: {int(lost)} routes do not fit {arm.budget} rows, but it counted {found.dropped}"
        )
    errors = distance(found, wanted(given, arm.shape, scales, ids=ids))
    judge(arm.name, errors, precision_of(arm, precision))
    return found, errors
