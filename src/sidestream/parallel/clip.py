"""The global gradient norm and clipping under expert parallelism.

Replicated gradients are the same on every rank and count once; each expert counts once, on the rank that owns it.
Every rank gets the same norm and scales by the same factor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from sidestream.parallel.reduction import is_expert, local


def _local_grads(params: Sequence[Tensor], *, experts: bool) -> list[Tensor]:
    grads = [p.grad for p in params if p.grad is not None and is_expert(p) == experts]
    pieces = [local(g) for g in grads]
    return [g for g in pieces if g.numel()]  # the inf-norm of an empty piece is undefined


def _power_sum(
    grads: list[Tensor], norm_type: float, device: torch.device, group: dist.ProcessGroup | None
) -> Tensor:
    """Sum of |g|^p over all pieces in fp64, or the maximum for p = inf."""
    is_inf = norm_type == float("inf")
    total = torch.zeros((), dtype=torch.float64, device=device)
    if grads:
        norms = torch.stack([torch.linalg.vector_norm(g, norm_type, dtype=torch.float32) for g in grads])
        total = norms.double().max() if is_inf else (norms.double() ** norm_type).sum()
    if group is not None:
        dist.all_reduce(total, op=dist.ReduceOp.MAX if is_inf else dist.ReduceOp.SUM, group=group)
    return total


def global_norm(
    params: Sequence[Tensor],
    *,
    expert_group: dist.ProcessGroup | None,
    dense_group: dist.ProcessGroup | None = None,
    norm_type: float = 2.0,
) -> Tensor:
    """Norm of all gradients of the model, each counted once.

    Args:
        params: All trainable parameters.
        expert_group: Ranks over which an expert gradient is cut into pieces (`Reduction.shard_group`); None: not cut.
            Collective over it.
        dense_group: The same for the other gradients.
        norm_type: p, or inf.

    Returns:
        Scalar fp32, equal on every rank.
    """
    device = params[0].device
    dense = _power_sum(_local_grads(params, experts=False), norm_type, device, dense_group)
    experts = _power_sum(_local_grads(params, experts=True), norm_type, device, expert_group)
    if norm_type == float("inf"):
        return torch.maximum(dense, experts).float()
    return ((dense + experts) ** (1.0 / norm_type)).float()


def clip_by_norm(params: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients in place by `min(1, max_norm / (norm + 1e-6))`. No host read."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for experts in (False, True):
        for g in _local_grads(params, experts=experts):
            by_dtype.setdefault(g.dtype, []).append(g)
    for dtype, grads in by_dtype.items():
        torch._foreach_mul_(grads, factor.to(dtype))
