"""Micro runs that are started, cut back to a checkpoint, changed and resumed, in a fraction of a second each.

Everything of a run is real but what it leaves for people: no picture, no record of the machine.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf, open_dict

from sidestream.config.compatibility import check
from sidestream.config.layout import Layout
from sidestream.launch import entry, resume
from sidestream.launch.record import RESOLVED, Launch
from sidestream.tracking.integrity import checkpoints, step_of
from tests.rank_pool import ranks
from tests.train.fit import CONF, train_one

STEPS, SAVED = 6, 3

# Two blocks, one of them with experts, of width 16; a schedule in the middle of its warm-up at the checkpoint.
MICRO = [
    "model.num_layers=2",
    "model.hidden_size=16",
    "model.num_heads=2",
    "model.num_kv_heads=2",
    "model.ffn_hidden_size=16",
    "model.num_experts=4",
    "model.expert_hidden_size=16",
    "data=text",
    "data.val_fraction=0.2",
    "data.seq_length=8",
    "data.global_batch_size=4",
    "trainer.accelerator=cpu",
    f"trainer.max_steps={STEPS}",
    "trainer.log_every_n_steps=1",
    "trainer.val_check_interval=100",
    "trainer.limit_val_batches=0",
    "trainer.pin_cpu=false",
    "trainer.peak_tflops=null",
    "scheduler.warmup_steps=5",
    "callbacks.progress.enabled=false",
    f"callbacks.checkpoint.every_n_steps={SAVED}",
    "callbacks.checkpoint.keep_last=9",
]


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    Attributes:
        bits: Digest of weights, balancing bias and optimizer state; equal only if all of them are, bit for bit.
        losses: Step -> training loss.
        rates: Step -> learning rate.
        seen: What `look` returned on rank 0.
        result: result.json of rank 0.
    """

    bits: str
    losses: dict[int, float]
    rates: dict[int, float]
    seen: Any
    result: dict[str, Any]


def write_text(folder: Path) -> Path:
    """A file to train on."""
    path = folder / "text.txt"
    if not path.exists():
        path.write_text("".join(f"{i} squared is {i * i}. " for i in range(500)))
    return path


@cache
def _composed(overrides: tuple[str, ...]) -> DictConfig:
    entry.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", list(overrides))


def config(
    folder: Path, *overrides: str, world: int = 1, options: dict[str, str] | None = None, **keys: Any
) -> DictConfig:
    """The config of a micro run.

    Args:
        folder: Where text and cache lie.
        overrides: As typed; composed once.
        options: Group -> another option of it, with its values as they are in conf/.
        keys: Dotted key -> value, set on a copy.
    """
    # Composing takes longer than training, so what changes from test to test is set afterwards.
    cfg = _composed((*MICRO, *overrides)).copy()
    places = {"data.cache_dir": str(folder / "cache"), "trainer.devices": world}
    if "files" in cfg.data.keys():  # noqa: SIM118 - `in` is false where a value is missing
        places["data.files"] = [str(write_text(folder))]
    with open_dict(cfg):
        for group, name in (options or {}).items():
            cfg[group] = option(group, name)
        for key, value in {**places, **keys}.items():
            OmegaConf.update(cfg, key, value)
    return cfg


@cache
def option(group: str, name: str) -> DictConfig:
    """An option of conf/, without what it says of the others."""
    content: Any = OmegaConf.load(CONF / group / f"{name}.yaml")
    content = content.get(group, content)
    content.pop("defaults", None)
    return content


def write_start(cfg: DictConfig, folder: Path) -> Layout:
    """What the parent leaves for the ranks."""
    layout = check(cfg)
    (folder / ".hydra").mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create(entry.resolve(cfg)), folder / RESOLVED)
    Launch(command="python train.py", overrides=[], flags=[], choices={}, layout=layout).save(folder)
    return layout


def cut_back(run: Path, folder: Path) -> Path:
    """A copy of a run as it was at its checkpoint in the middle."""
    shutil.copytree(run, folder)
    for checkpoint in checkpoints(folder):
        if step_of(checkpoint) > SAVED:
            shutil.rmtree(checkpoint)
    return folder


def changes(folder: Path, cfg: DictConfig) -> list[str]:
    """What the parent says of a resume with this config, see `resume.check_changes`."""
    return resume.check_changes(folder, new=entry.resolve(cfg), layout=check(cfg))


Look: TypeAlias = Callable[[Any], Any] | None
Case: TypeAlias = tuple[dict[str, Any], str, Look]


def run_all(
    cases: Sequence[tuple[DictConfig, Path, Look]], *, world: int = 1, limit_s: float = 240
) -> list[Any]:
    """Run them one after another; what rank 0 says of each."""
    given = []
    for cfg, folder, look in cases:
        write_start(cfg, folder)
        given.append((entry.resolve(cfg), str(folder), look))
    return ranks(world).run(run_many, cases=given, limit_s=limit_s)[0]


def run_many(rank: int, world: int, *, cases: list[Case]) -> list[Ended | str]:
    """One rank of several runs, one after another; an error is its last line.

    Args:
        cases: Resolved config, run folder, and what is to be read of the module when training ends.
    """
    from sidestream import run
    from sidestream.tracking.folder import RunFolder

    kept = {name: getattr(run, name) for name in ("_draw_load", "code_state", "SidestreamModule")}
    write_env = RunFolder.write_env
    run._draw_load = lambda *args: None  # type: ignore[assignment]
    run.code_state = lambda: (None, False)  # type: ignore[assignment]
    RunFolder.write_env = lambda self, **_: None  # type: ignore[method-assign,assignment]
    try:
        return [_run_one(rank, world, *case) for case in cases]
    finally:
        RunFolder.write_env = write_env  # type: ignore[method-assign]
        for name, value in kept.items():
            setattr(run, name, value)


def _run_one(rank: int, world: int, cfg: dict[str, Any], folder: str, look: Any) -> Ended | str:
    from sidestream import run
    from sidestream.lightning.module import SidestreamModule
    from sidestream.tracking.folder import RunFolder

    ended: dict[str, Any] = {}

    class Watched(SidestreamModule):
        def on_train_end(self) -> None:
            super().on_train_end()
            ended["bits"] = digest(self)
            ended["seen"] = look(self) if look is not None else None

    run.SidestreamModule = Watched  # type: ignore[misc]
    layout = Launch.load(Path(folder)).layout
    try:
        result = train_one(rank, world, cfg=cfg, layout=asdict(layout), folder=folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    records = [r for r in RunFolder(Path(folder)).read_metrics() if "train/loss" in r]
    losses, rates = ({r["step"]: r[name] for r in records} for name in ("train/loss", "train/lr"))
    return Ended(losses=losses, rates=rates, result=result, **ended)


def digest(module: Any) -> str:
    """Of this rank's weights, buffers and optimizer state."""
    found = hashlib.sha256()
    optimizer = module.trainer.optimizers[0]
    named = {**dict(module.model.named_parameters()), **dict(module.model.named_buffers())}
    for name, tensor in sorted(named.items()):
        moments = optimizer.state.get(tensor, {})
        for part in (tensor, *(moments[key] for key in sorted(moments))):
            local = part.to_local() if hasattr(part, "to_local") else torch.as_tensor(part)
            found.update(name.encode())
            found.update(local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
