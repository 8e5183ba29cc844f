"""The global gradient norm and clipping under expert parallelism.

Replicated gradients are the same on every rank and count once; each expert counts once, on the rank that owns it.
Every rank gets the same norm and scales by the same factor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from sidestream.parallel.replicate import is_expert


def _local_grads(params: Sequence[Tensor], *, experts: bool) -> list[Tensor]:
    grads = [p.grad for p in params if p.grad is not None and is_expert(p) == experts]
    locals_ = [g.to_local() if is_expert(g) else g for g in grads]  # type: ignore[attr-defined]
    return [g for g in locals_ if g.numel()]  # the inf-norm of an empty shard is undefined


def _power_sum(grads: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Sum of |g|^p in fp64, or the maximum for p = inf."""
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack([torch.linalg.vector_norm(g, norm_type, dtype=torch.float32) for g in grads]).double()
    return norms.max() if norm_type == float("inf") else (norms**norm_type).sum()


def global_norm(
    params: Sequence[Tensor], *, ep_group: dist.ProcessGroup | None, norm_type: float = 2.0
) -> Tensor:
    """Norm of all gradients of the model, each counted once.

    Args:
        params: All trainable parameters; experts are DTensors.
        ep_group: The expert-parallel group; None for one rank. Collective over it.
        norm_type: p, or inf.

    Returns:
        Scalar fp32, equal on every rank.
    """
    device = params[0].device
    dense = _power_sum(_local_grads(params, experts=False), norm_type, device)
    experts = _power_sum(_local_grads(params, experts=True), norm_type, device)
    is_inf = norm_type == float("inf")
    if ep_group is not None and dist.get_world_size(ep_group) > 1:
        dist.all_reduce(experts, op=dist.ReduceOp.MAX if is_inf else dist.ReduceOp.SUM, group=ep_group)
    total = torch.maximum(dense, experts) if is_inf else (dense + experts) ** (1.0 / norm_type)
    return total.float()


def clip_by_norm(params: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients in place by `min(1, max_norm / (norm + 1e-6))`. No host read."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for experts in (False, True):
        grads = _local_grads(params, experts=experts)
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for g in grads:
            by_dtype.setdefault(g.dtype, []).append(g)
        for dtype, same in by_dtype.items():
            torch._foreach_mul_(same, factor.to(dtype))
