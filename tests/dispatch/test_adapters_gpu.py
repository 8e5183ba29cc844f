"""The adapters on the true libraries, where they import: the same problems as on the doubles, on NCCL ranks."""

import os
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from sidestream.config.availability import LIBRARIES
from sidestream.dispatch.library import load
from sidestream.exchange.link import NativeLink
from tests.dispatch.adapters import ADAPTERS, Setup, compare, dense, draw, kept, spec_of, step, to_device
from tests.dispatch.test_adapters import crowd

pytestmark = pytest.mark.gpu


def missing(name: str) -> str | None:
    """Why the library cannot run here."""
    wanted = 2 if name == "hybrid_ep" else 1
    if torch.cuda.device_count() < wanted:
        return f"needs {wanted} CUDA device{'s' * (wanted > 1)}, torch sees {torch.cuda.device_count()}"
    if torch.cuda.get_device_capability() < (9, 0):
        return f"{LIBRARIES[name].name} needs compute capability 9.0"
    return load(name)[1]


def rank_of_gpu(rank: int, world: int, store: str, name: str) -> None:
    os.environ.setdefault("EP_DISABLE_GIN", "1")  # DeepEP on one machine without RDMA
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=world, device_id=device
    )
    try:
        for factor in (None, 2.0):
            setup = Setup(name, factor, dtype=torch.bfloat16, spec={"device": device, "hidden_size": 256})
            check(setup, rank, world, device)
        if world == 2:
            overflow = Setup(name, 0.5, dtype=torch.bfloat16, tokens=(32, 32), ids=crowd(32))
            check(overflow.with_(spec={"device": device, "hidden_size": 256}), rank, world, device)
    finally:
        dist.destroy_process_group()


def check(setup: Setup, rank: int, world: int, device: torch.device) -> None:
    adapter = ADAPTERS[setup.name][0](capacity_factor=setup.capacity_factor, alignment=setup.alignment)
    adapter.wire(group=dist.group.WORLD, spec=spec_of(setup), link=NativeLink())
    for seed in range(2):
        p = draw(setup, world, seed=seed)
        budget = 10**9 if adapter.budget is None else adapter.budget
        keep, needed = kept(p, budget=budget, alignment=setup.alignment)
        compare(step(adapter, to_device(p, device), rank), dense(p, rank, keep), setup)
        if adapter.budget is not None:
            assert adapter.needed().tolist() == [needed[rank]]
            adapter.reset_needed()
    adapter.close()


@pytest.mark.parametrize("name", ADAPTERS)
def test_true_library(name):
    if (reason := missing(name)) is not None:
        pytest.skip(reason)
    world = min(2, torch.cuda.device_count())
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_of_gpu, args=(world, str(Path(folder) / "store"), name), nprocs=world)
