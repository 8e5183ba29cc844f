"""Does an arm move the right rows? `conformance/rows.py` on the dispatchers of conf/, with what their budgets lose.

Legend: T tokens of this rank, K routes per token, H features, E experts.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from sidestream.conformance import rows
from sidestream.conformance.rows import Given, Outcome
from sidestream.dispatch.base import Routing
from sidestream.dispatch.cap import cap_routing
from sidestream.dispatch.packed import route_counts
from sidestream.measure.dispatch_arms import DispatcherArm
from sidestream.measure.shapes import LayerShape


def make_scales(shape: LayerShape, device: torch.device, *, seed: int) -> Tensor:
    """`[E, H]` fp32 between 0.5 and 1.5, the same on every rank."""
    return rows.make_scales(shape.num_experts, shape.hidden_size, device, seed=seed)


def found_by(arm: DispatcherArm, given: Given, scales: Tensor) -> Outcome:
    """What the arm computes. Collective."""
    arm.dispatcher.reset_needed()
    found = rows.found_by(arm.dispatcher, given, scales, group=dist.group.WORLD)
    arm.dispatcher.reset_needed()
    return found


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
    return rows.distance(found, other, group=dist.group.WORLD)


def judge(name: str, errors: dict[str, float], precision: str) -> None:
    """Raise where an error is above its tolerance.

    Args:
        precision: `fp32`, `bf16`, or `mxfp8` for rows that travel in 8 bits.

    Raises:
        ValueError: On every rank.
    """
    if (problem := rows.too_far(errors, precision)) is not None:
        raise ValueError(f"{name}: {problem}")


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
    right = rows.wanted(given, scales, ids=ids, group=dist.group.WORLD)
    errors = distance(found, right)
    judge(arm.name, errors, precision_of(arm, precision))
    return found, errors
