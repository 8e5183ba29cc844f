"""Model on ranks: build the local part, start it from the seed, make the experts DTensors."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from sidestream.dispatch.base import Dispatcher, DispatchSpec
from sidestream.exchange.link import Link
from sidestream.fusion.base import Fusion, fused_of, resolve_alignment
from sidestream.model.config import ModelShape
from sidestream.model.initialize import initialize
from sidestream.model.moe import MoEParts
from sidestream.model.transformer import MoETransformer
from sidestream.overlap.base import Schedule
from sidestream.parallel.mesh import Parallel
from sidestream.routing.balance import Balance
from sidestream.routing.router import Router


def shard_experts(model: MoETransformer, parallel: Parallel) -> None:
    """Wrap the local expert weights as DTensors, `Shard(0)` on `ep`; their storage stays where it is."""
    mesh = parallel.sparse["ep"]
    for moe in model.moe_layers():
        for name, weight in list(moe.experts.named_parameters(recurse=False)):
            sharded = DTensor.from_local(weight.data, mesh, [Shard(0)], run_check=False)
            setattr(moe.experts, name, nn.Parameter(sharded))


def assemble(
    shape: ModelShape,
    *,
    router: Router,
    balance: Balance,
    dispatcher: Dispatcher,
    fusion: Fusion,
    schedule: Schedule,
    link: Link,
    parallel: Parallel,
    seed: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype | None = None,
    max_tokens: int = 0,
) -> MoETransformer:
    """Build this rank's part of a model, with plain tensors (`Reduction.shard` comes next). Collective.

    Args:
        shape: Model shape.
        router, balance, dispatcher, fusion, schedule, link: The choices.
        parallel: Groups.
        seed: Seed of the initial weights.
        device: Where the parameters live.
        dtype: Parameters' dtype; gate and selection bias are fp32 in any case.
        compute_dtype: Dtype of the expert rows when it differs from `dtype` (autocast).
        max_tokens: Most tokens of a rank in one plan; equal on all ranks.
    """
    rows_dtype = compute_dtype or dtype
    spec = DispatchSpec(
        num_experts=shape.num_experts,
        hidden_size=shape.hidden_size,
        alignment=resolve_alignment(fusion.alignment, dtype=rows_dtype, device_type=device.type),
        max_tokens=max_tokens,
        top_k=router.top_k,
        num_layers=max(1, len(shape.moe_blocks)),
        dtype=rows_dtype,
        device=device,
    )
    dispatcher.wire(group=parallel.ep_group, spec=spec, link=link)
    parts = MoEParts(
        router=router,
        balance=balance,
        dispatcher=dispatcher,
        fusion=fusion,
        expert_range=parallel.expert_range(shape.num_experts),
        tokens_per_plan=max_tokens,
        fused=fused_of(fusion),
    )
    with device:
        model = MoETransformer(shape, parts, schedule)
    initialize(model, seed=seed)
    model.to(dtype)
    return model
