"""Whole training runs in the rank pool: the path of `train.py` from the composed config to result.json.

Everything but the start of processes is real: Hydra config, Lightning trainer, checkpoints, run folder. No picture is
drawn unless asked for: that takes as long as the training.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from sidestream.config.compatibility import check
from sidestream.config.layout import Layout
from sidestream.launch import entry, stopping
from sidestream.launch.record import Launch
from sidestream.launch.worker import RankEnv
from tests.rank_pool import ranks

CONF = Path(__file__).parents[2] / "conf"

# A micro run: 2 dense and 2 MoE layers of width 64 on 16-token sequences.
MICRO = [
    "model.hidden_size=64",
    "model.ffn_hidden_size=64",
    "model.expert_hidden_size=64",
    "model.num_experts=4",
    "data.seq_length=16",
    "trainer.max_steps=6",
    "trainer.log_every_n_steps=1",
    "trainer.val_check_interval=100",
    "trainer.limit_val_batches=2",
    "trainer.pin_cpu=false",
    "callbacks.checkpoint.every_n_steps=100",
    "scheduler.warmup_steps=2",
]


def compose_run(overrides: list[str], *, world: int) -> tuple[Any, Layout]:
    """Compose and check a config for `world` CPU ranks."""
    entry.register()
    arguments = [*MICRO, f"trainer.devices={world}", "trainer.accelerator=cpu", *overrides]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("train", arguments)
    layout = check(cfg)
    return OmegaConf.to_container(cfg, resolve=True), layout


def fit(
    folder: Path, *overrides: str, world: int = 2, limit_s: float = 240, **hooks: Any
) -> list[dict[str, Any]]:
    """Train; return each rank's result. `hooks` go to `train_one`."""
    cfg, layout = compose_run(list(overrides), world=world)
    (folder / ".hydra").mkdir(parents=True, exist_ok=True)
    Launch(command="python train.py", overrides=[], flags=[], choices={"model": "tiny"}, layout=layout).save(
        folder
    )
    return ranks(world).run(
        train_one, limit_s=limit_s, cfg=cfg, layout=asdict(layout), folder=str(folder), **hooks
    )


def train_one(
    rank: int,
    world: int,
    *,
    cfg: dict[str, Any],
    layout: dict[str, Any],
    folder: str,
    stop: tuple[int, int] | None = None,
    stop_validation: tuple[int, int] | None = None,
    path: str | None = None,
    picture: bool = False,
) -> dict[str, Any]:
    """One rank. `stop=(rank, step)`: that rank asks to stop during that step;
    `stop_validation=(rank, batch)`: before that batch of a validation. `path`: goes on `sys.path`."""
    from sidestream import run
    from sidestream.lightning.module import SidestreamModule

    if path is not None:
        sys.path.insert(0, path)
    env = RankEnv(rank, rank, world, world, "file:///not-used")
    stopping._received = None
    original, validation = SidestreamModule.training_step, SidestreamModule.validation_step
    draw_load, groups = run._draw_load, set(_groups())
    if not picture:
        run._draw_load = lambda *args: None  # type: ignore[assignment]
    if stop_validation is not None and stop_validation[0] == rank:

        def validation_step(self: Any, batch: Any, batch_idx: int) -> Any:
            if batch_idx == stop_validation[1]:
                stopping._received = 15
            return validation(self, batch, batch_idx)

        SidestreamModule.validation_step = validation_step  # type: ignore[method-assign]
    if stop is not None and stop[0] == rank:

        def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
            if self.global_step + 1 == stop[1]:
                stopping._received = 15
            return original(self, batch, batch_idx)

        SidestreamModule.training_step = training_step  # type: ignore[method-assign]
    try:
        return run.train(OmegaConf.create(cfg), layout=Layout(**layout), folder=Path(folder), env=env)
    finally:
        stopping._received = None
        run._draw_load = draw_load
        for group in [group for group in _groups() if group not in groups]:
            dist.destroy_process_group(group)  # each has threads that wake up a hundred times a second
        SidestreamModule.training_step = original  # type: ignore[method-assign]
        SidestreamModule.validation_step = validation  # type: ignore[method-assign]


def _groups() -> Any:
    return dist.distributed_c10d._world.pg_map


def losses(folder: Path) -> dict[int, float]:
    """Step -> training loss from metrics.jsonl."""
    from sidestream.tracking.folder import RunFolder

    return {r["step"]: r["train/loss"] for r in RunFolder(folder).read_metrics() if "train/loss" in r}


def tensors(checkpoint: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint (model and optimizer), whole."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    return state


def assert_same_run(a: Path, b: Path) -> None:
    """Losses of all steps, and every tensor of the last checkpoint, bit for bit."""
    import torch

    from sidestream.lightning.checkpoint import checkpoints

    assert losses(a) == losses(b)
    first, second = tensors(checkpoints(a)[-1]), tensors(checkpoints(b)[-1])
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different, f"{len(different)} tensors differ, first {different[0]}"
