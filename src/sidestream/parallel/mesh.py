"""Process groups and meshes of expert parallelism.

One world, seen twice: dense parameters on `("dp",)`, experts on `("edp", "ep")`, `ep` innermost, so that the ranks
that exchange tokens are neighbours. For 4 ranks and ep = 2: ep groups [0,1] [2,3], edp groups [0,2] [1,3].
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Parallel:
    """The live groups of this rank. Sizes come from the world, never from the config.

    Attributes:
        dense: 1-D mesh `("dp",)` over all ranks.
        sparse: 2-D mesh `("edp", "ep")`.
        control: Group over all ranks for the small per-step reductions; apart from the gradient traffic.
    """

    dense: DeviceMesh
    sparse: DeviceMesh
    control: dist.ProcessGroup

    @property
    def world_size(self) -> int:
        return self.dense.size()

    @property
    def ep_size(self) -> int:
        return self.sparse.size(1)

    @property
    def ep_rank(self) -> int:
        return self.sparse.get_local_rank("ep")

    @property
    def dp_group(self) -> dist.ProcessGroup:
        return self.dense.get_group("dp")

    @property
    def edp_group(self) -> dist.ProcessGroup:
        return self.sparse.get_group("edp")

    @property
    def ep_group(self) -> dist.ProcessGroup:
        return self.sparse.get_group("ep")

    def expert_range(self, num_experts: int) -> tuple[int, int]:
        """First and past-the-last global id of the experts on this rank."""
        if num_experts % self.ep_size:
            raise ValueError(
                f"model.num_experts={num_experts}: expected a multiple of the expert-parallel size {self.ep_size}"
            )
        share = num_experts // self.ep_size
        return self.ep_rank * share, (self.ep_rank + 1) * share


def _group_of_this_rank(rank_lists: list[list[int]], timeout: timedelta, kind: str) -> dist.ProcessGroup:
    """Create all groups of a kind, in the same order on every rank, and return the one this rank is in."""
    mine = None
    for ranks in rank_lists:
        group = dist.new_group(ranks, timeout=timeout, group_desc=kind)
        if dist.get_rank() in ranks:
            mine = group
    assert mine is not None
    return mine


def build_parallel(*, expert_parallel_size: int, device_type: str, timeout: timedelta) -> Parallel:
    """Create every group of a run. Collective; call once, after `init_process_group`.

    Groups are made by hand and not by `init_device_mesh`, because each needs the time-out.
    """
    world, ep = dist.get_world_size(), expert_parallel_size
    if ep < 1 or world % ep:
        raise ValueError(f"strategy.expert_parallel_size={ep}: expected a divisor of the world size {world}")
    grid = torch.arange(world).view(world // ep, ep)
    dp = _group_of_this_rank([list(range(world))], timeout, "data-parallel")
    control = _group_of_this_rank([list(range(world))], timeout, "control")
    edp_group = _group_of_this_rank(grid.t().tolist(), timeout, "expert-data-parallel")
    ep_group = _group_of_this_rank(grid.tolist(), timeout, "expert-parallel")
    dense = DeviceMesh.from_group(dp, device_type, mesh_dim_names=("dp",))
    sparse = DeviceMesh.from_group(
        [edp_group, ep_group], device_type, mesh=grid, mesh_dim_names=("edp", "ep")
    )
    return Parallel(dense, sparse, control)
