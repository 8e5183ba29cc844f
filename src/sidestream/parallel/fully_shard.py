"""`strategy=fully_shard`: parameters, gradients and optimizer state in pieces over all ranks, for memory.

torch's `fully_shard` per block and root for dense parameters (over `dp`), per expert stack over `edp` beside its
`ep` sharding. Gradients are reduced by every micro-batch, into pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from sidestream.model.transformer import MoETransformer
from sidestream.parallel.agree import check_replicas
from sidestream.parallel.assemble import shard_experts
from sidestream.parallel.mesh import Parallel


class FullyShard:
    """FSDP2 with SUM reduction and factor 1: the loss is divided once, by the global token count.

    Args:
        reshard_after_forward: Free a block's gathered parameters after its forward and gather them again in backward:
            less memory, one more gather.
    """

    name = "fully_shard"
    holds_replicas = False

    def __init__(self, *, reshard_after_forward: bool = True) -> None:
        self.reshard_after_forward = reshard_after_forward
        self._params: list[nn.Parameter] = []

    def shard(self, model: MoETransformer, parallel: Parallel) -> None:
        shard_experts(model, parallel)
        # Each rank keeps its piece of its own copy: the last moment at which the copies can be compared.
        check_replicas(model, parallel)
        options: Any = {"reshard_after_forward": self.reshard_after_forward}
        # A fused path reads the experts from its start to the end of its backward, which no module's call spans.
        keep = {"reshard_after_forward": False} if model.parts.fused is not None else {}
        for moe in model.moe_layers():
            fully_shard(moe.experts, mesh=parallel.sparse["edp"], **{**options, **keep})
        for block in model.blocks:
            # A block that the unit behind it runs is never called as a whole, so its parts gather for themselves;
            # its norms stay with the root.
            pieces: list[Any] = [block.self_attention, block.ffn] if model.runs_in_parts(block) else [block]
            for piece in pieces:
                fully_shard(piece, mesh=parallel.dense, **options)
        fully_shard(model, mesh=parallel.dense, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # torch 2.13 divides twice for other factors when a group has one rank, and gloo has no pre-multiply.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def attach(self, model: MoETransformer, parallel: Parallel) -> None:
        self._params = [p for p in model.parameters() if p.requires_grad]

    def reattach(self) -> None:
        """Gradients are made anew in every step."""

    def zero(self) -> None:
        for p in self._params:
            p.grad = None

    @contextmanager
    def last_micro_batch(self) -> Iterator[None]:
        yield
        for p in self._params:
            assert p.grad is not None, "a parameter got no gradient: it is not part of the graph on this rank"

    def shard_group(self, parallel: Parallel, *, expert: bool) -> dist.ProcessGroup | None:
        # Experts are cut over edp and ep, dense parameters over dp: all ranks either way.
        return parallel.dp_group if parallel.world_size > 1 else None

    def close(self) -> None:
        self._params = []
