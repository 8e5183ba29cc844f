"""Does a run fit into the memory of this machine? Asked before any rank is started, with the predictor's account."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from sidestream.config.compatibility import check
from sidestream.config.errors import ConfigError
from sidestream.config.layout import Layout
from sidestream.config.place import CONF
from sidestream.model.config import shape_from
from sidestream.predict.job import Job
from sidestream.predict.layer import Mover
from sidestream.predict.memory import Memory, memory
from sidestream.predict.read import BYTES_OF_TEXT, MATH, cluster_of, sharding, state_bytes
from sidestream.predict.traffic import Routes

# What is kept for the backward pass is estimated from above; what cannot fit needs this share of it for sure.
SURE = 0.5
# Sizes that may be halved, with what they are in a model for a laptop.
_HALVED = {
    "model.num_layers": 4,
    "model.num_experts": 8,
    "model.hidden_size": 128,
    "model.ffn_hidden_size": 512,
    "model.expert_hidden_size": 256,
    "model.vocab_size": 1024,
    "data.seq_length": 256,
    "data.global_batch_size": 8,
}
_WORTH_IT = 0.98  # of the memory before
_MOST_STEPS = 100


def check_memory(cfg: DictConfig, layout: Layout, *, free: int | None = None) -> None:
    """Refuses a run that cannot fit.

    Args:
        cfg: The root config, which `check` has passed.
        layout: What it returned.
        free: Bytes that a rank may take; None asks this machine.

    Raises:
        ConfigError: with the same run cut down until it fits.
    """
    free = free_bytes(layout) if free is None else free
    needed = account_here(cfg, layout)
    if free is None or least(needed) <= free:
        return
    gib = 2**30
    raise ConfigError(
        "model.num_layers",
        cfg.model.num_layers,
        f"each of {layout.world_size} ranks needs {least(needed) / gib:,.1f} GiB "
        f"(weights {needed.weights / gib:,.1f}, gradients {needed.gradients / gib:,.1f}, optimizer "
        f"{needed.optimizer / gib:,.1f}), and there are {free / gib:,.1f} GiB for each on this machine",
        expected="a run that fits, or a larger machine (predict.py says which)",
        fix=_cut_down(cfg, layout, free),
    )


def account_here(cfg: DictConfig, layout: Layout) -> Memory:
    """What a rank of a run needs, as `predict.py` counts it."""
    node = OmegaConf.load(CONF / "cluster" / "cpu_2core.yaml")
    cluster = replace(cluster_of(node, name="this machine"), gpus_per_domain=layout.local_world_size)  # type: ignore[arg-type]
    values: Any = OmegaConf.to_container(cfg.model, resolve=True)
    router, sharded, factor = cfg.router, sharding(cfg), cfg.dispatcher.get("capacity_factor")
    # Of an own optimizer nothing is sure, and what is not sure refuses nothing.
    weight, gradient, state = state_bytes(cfg, moments_of_others=0)
    if not str(cfg.optimizer.get("_target_")).startswith("torch."):
        state = 0  # nobody knows what a user's own keeps, so no run is refused for it
    job = Job(
        shape=shape_from(values, vocab_size=BYTES_OF_TEXT),
        routes=Routes(cfg.model.num_experts, router.get("top_k") or 1, 1, 1),
        mover=Mover(
            packing="per_rank",
            packs_in_kernel=False,
            reads_counts=True,
            slots=min(factor if isinstance(factor, int | float) else 1.0, layout.expert_parallel_size),
        ),
        seq_length=cfg.data.seq_length,
        micro_batch_size=layout.micro_batch_size,
        micro_batches=layout.accumulation,
        expert_parallel_size=layout.expert_parallel_size,
        data_parallel_size=layout.world_size,
        math=MATH[cfg.trainer.precision],
        sharding=sharded,
        state_bytes=(weight, gradient, state),
    )
    return memory(job, cluster)


def least(needed: Memory) -> float:
    """Bytes without which a run cannot be."""
    state = needed.weights + needed.gradients + needed.optimizer + needed.gathered
    return state + SURE * (needed.activations + needed.exchange + needed.logits)


def free_bytes(layout: Layout) -> int | None:
    """Bytes that each rank may take on this machine; None where nobody tells."""
    if layout.device_type == "cuda":
        return _gpu_bytes()
    found = [_available(), *_limits()]
    known = [value for value in found if value is not None]
    return min(known) // layout.local_world_size if known else None


def _available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def _limits() -> list[int | None]:
    """Limits that a container or a job of a cluster puts on this process."""
    limits: list[int | None] = []
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(name).read_text(encoding="ascii").strip()
        except OSError:
            continue
        limits.append(int(text) if text.isdigit() else None)
    return limits


def _gpu_bytes() -> int | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return min(int(line) for line in done.stdout.split()) * 2**20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _cut_down(cfg: DictConfig, layout: Layout, free: int) -> str:
    """Overrides with which the run fits: what is furthest from a laptop's size is halved, again and again."""
    smaller, changed, needed = cfg.copy(), set(), least(account_here(cfg, layout))
    for _ in range(_MOST_STEPS):
        values = {key: OmegaConf.select(smaller, key) for key in _HALVED}
        sizes = {key: value for key, value in values.items() if isinstance(value, int) and value > 1}
        for key in sorted(sizes, key=lambda key: _HALVED[key] / sizes[key]):
            trial = _with(smaller, key, sizes[key] // 2)
            try:
                there = check(trial, world_size=layout.world_size, local_world_size=layout.local_world_size)
            except ConfigError:
                continue
            if (then := least(account_here(trial, there))) < _WORTH_IT * needed:
                smaller, needed = trial, then
                changed.add(key)
                break
        else:
            break
        if needed <= 0.8 * free:
            return " ".join(f"{key}={OmegaConf.select(smaller, key)}" for key in _HALVED if key in changed)
    return "model=tiny"


def _with(cfg: DictConfig, key: str, value: int) -> DictConfig:
    changed = cfg.copy()
    with read_write(changed), open_dict(changed):
        OmegaConf.update(changed, key, value)
    return changed
