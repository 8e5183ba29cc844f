"""Measuring on ranks that exist already: started by torchrun, on GPUs over NCCL or on CPUs over gloo."""

from __future__ import annotations

import importlib
import os
import platform
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sidestream.launch.allocator import keep_freed_memory
from sidestream.launch.worker import RankEnv
from sidestream.parallel.world import join_world, leave_world


def device_of(kind: str, local_rank: int) -> torch.device:
    """This rank's device.

    Args:
        kind: `auto`: a GPU where torch sees one. `cpu` or `cuda`.

    Raises:
        ValueError: There is no GPU for this rank.
    """
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if torch.cuda.device_count() <= local_rank:
        raise ValueError(
            f"device={kind}: local rank {local_rank}, but torch sees {torch.cuda.device_count()} GPUs"
        )
    return torch.device("cuda", local_rank)


def run_here(job: dict[str, Any], *, module: str, device: str, timeout_s: float) -> dict[str, Any]:
    """Join torchrun's world, run `run_plain` of the module on this rank, leave. Collective.

    Args:
        job: The module's `Job` in plain types, and `malloc`.
        device: See `device_of`.
        timeout_s: Of the collectives.

    Returns:
        As `ranks.run_ranks`, with `device`, `hosts` and `nccl`; the same on every rank.
    """
    env = RankEnv.from_environ("env://")
    place = device_of(device, env.local_rank)
    plain = dict(job)
    kept = plain.pop("malloc") == "keep" and keep_freed_memory()
    if place.type == "cuda":
        torch.cuda.set_device(place)
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    join_world(env, place, timeout=timedelta(seconds=timeout_s))
    hosts: list[str] = [""] * env.world_size
    dist.all_gather_object(hosts, platform.node())
    say = print if env.rank == 0 else lambda _: None
    records = importlib.import_module(module).run_plain(plain, say=say, device=place)
    name, nccl = "cpu", None
    if place.type == "cuda":
        name = torch.cuda.get_device_name(place)
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[arg-type]
    dist.barrier()
    leave_world()
    return {
        "records": records,
        "pinned": False,
        "memory_kept": kept,
        "device": name,
        "hosts": sorted(set(hosts)),
        "nccl": nccl,
    }
