"""Entering and leaving the world: the default process group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

_FILE = "file://"


class Rank(Protocol):
    """Who this rank is; `store` is `file://` and a path as it is (our launcher: no port that could be taken) or `env://`."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def store(self) -> str: ...


def join_world(
    env: Rank, device: torch.device, *, timeout: timedelta, store: dist.Store | None = None
) -> bool:
    """Create the default process group: gloo on CPU, NCCL (and gloo for host tensors) on CUDA.

    Args:
        env: This rank.
        device: This rank's device.
        timeout: Time-out of the default group.
        store: A store that is already connected (torchrun); instead of `env.store`.

    Returns:
        False if this process was in a world already, which then is not ours to destroy.
    """
    if dist.is_initialized():
        return False
    options: dict[str, Any] = {"rank": env.rank, "world_size": env.world_size, "timeout": timeout}
    if store is not None:
        options["store"] = store
    else:
        # Not as a URL: torch would cut the path at the first `#` or `?` of it.
        if env.store.startswith(_FILE):
            options["store"] = dist.FileStore(env.store.removeprefix(_FILE), env.world_size)
        else:
            options["init_method"] = env.store
    if device.type == "cuda":
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, **options)
    else:
        dist.init_process_group("gloo", **options)
    return True


def leave_world() -> None:
    """Destroy all groups. After the last use of the model."""
    if dist.is_initialized():
        dist.destroy_process_group()
