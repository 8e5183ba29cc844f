"""Checks that ranks agree where they must, before the first step."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sidestream.parallel.mesh import Parallel
from sidestream.parallel.reduction import is_expert, local


def _digest(tensor: Tensor) -> int:
    data = local(tensor.detach()).contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "big")


def differing(tensors: Mapping[str, Tensor], parallel: Parallel) -> list[str]:
    """Names of the tensors that differ between ranks that must hold the same values. Collective.

    Args:
        tensors: Compared over all ranks, shards of experts over their `edp` group; the same names on every rank.
    """
    found: list[str] = []
    for experts, group in ((False, parallel.dp_group), (True, parallel.edp_group)):
        mine = {name: t.detach() for name, t in tensors.items() if is_expert(t) == experts}
        if dist.get_world_size(group) == 1 or not mine:
            continue
        device = local(next(iter(mine.values()))).device
        digests = torch.tensor([_digest(t) for t in mine.values()], dtype=torch.int64, device=device)
        lowest, highest = digests.clone(), digests.clone()
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=group)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        names = list(mine)
        found += [names[place] for place in (lowest != highest).nonzero().flatten().tolist()]
    return found


def check_replicas(model: nn.Module, parallel: Parallel) -> None:
    """Raise if a parameter or buffer differs between ranks that must hold the same values. Collective.

    Raises:
        RuntimeError: On every rank of the group, naming the first tensor that differs.
    """
    if found := differing({**dict(model.named_parameters()), **dict(model.named_buffers())}, parallel):
        raise RuntimeError(
            f"{len(found)} tensors differ between ranks that must hold equal copies, first: {found[0]}. "
            "Every rank must build the model from the same seed and config."
        )


def check_equal(what: str, value: str, parallel: Parallel) -> None:
    """Raise on every rank if `value` is not the same on all ranks. Collective.

    Raises:
        RuntimeError: Naming `what` and the values.
    """
    values: list[str] = [""] * parallel.world_size
    dist.all_gather_object(values, value, group=parallel.control)
    if len(set(values)) > 1:
        listed = ", ".join(f"rank {rank}: {v}" for rank, v in enumerate(values))
        raise RuntimeError(f"{what} differs between ranks ({listed})")
