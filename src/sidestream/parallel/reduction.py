"""Who owns the gradients: the protocol of `strategy=replicate` and `strategy=fully_shard`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from sidestream.model.transformer import MoETransformer
from sidestream.parallel.mesh import Parallel


class Reduction(Protocol):
    """Sums gradients over ranks: dense parameters over `dp`, experts over `edp`, SUM with factor 1.

    In this order: `shard`, then optimizer and checkpoint, then `attach`, then steps of `reattach`, `zero` and backward.
    """

    name: str
    holds_replicas: bool  # each rank has whole dense parameters, which must stay equal

    def shard(self, model: MoETransformer, parallel: Parallel) -> None:
        """Bring the parameters into the form in which the optimizer sees them. Collective, once."""
        ...

    def attach(self, model: MoETransformer, parallel: Parallel) -> None:
        """Take over the gradients; loading an optimizer needs them to be None, so this comes after it."""
        ...

    def reattach(self) -> None:
        """Before each step: put gradients back where somebody called `zero_grad(set_to_none=True)`. Host only."""
        ...

    def zero(self) -> None:
        """Set all gradients to zero, in place."""
        ...

    def last_micro_batch(self) -> AbstractContextManager[None]:
        """Around the last backward of a step. On exit every gradient is the sum over its ranks."""
        ...

    def shard_group(self, parallel: Parallel, *, expert: bool) -> dist.ProcessGroup | None:
        """Ranks over which the pieces of a gradient must be added up to see all of it; None: each rank has it all."""
        ...

    def close(self) -> None:
        """Let go of the gradients."""
        ...


def is_expert(tensor: Tensor) -> bool:
    """Expert weights are the DTensors on the `ep` axis, and so are their gradients and moments."""
    return isinstance(tensor, DTensor) and "ep" in (tensor.device_mesh.mesh_dim_names or ())


def local(tensor: Tensor) -> Tensor:
    """This rank's piece of a DTensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
