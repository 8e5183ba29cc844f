"""One rank: `python -m sidestream.launch.worker --folder <run>`, or `run_rank` in a process that exists already."""

import argparse
import faulthandler
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from sidestream import matplotlibrc
from sidestream.config import trust, withheld
from sidestream.config.errors import ConfigError
from sidestream.config.layout import Layout
from sidestream.launch import failures, phase, stopping, terminal
from sidestream.launch.allocator import keep_freed_memory
from sidestream.launch.lighter import without_transformers
from sidestream.launch.processes import die_with_parent
from sidestream.launch.record import Launch, as_config, load_resolved

STORE = "SIDESTREAM_STORE"


@dataclass(frozen=True)
class RankEnv:
    """Who this rank is and where it meets the others.

    Attributes:
        store: `file:///...` (a file that all ranks of one machine share) or `env://` (torchrun).
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    store: str

    @classmethod
    def from_environ(cls, store: str | None = None) -> "RankEnv":
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        rank, local_rank, world_size, local_world_size = (int(os.environ[name]) for name in names)
        return cls(rank, local_rank, world_size, local_world_size, store or os.environ[STORE])


def run_rank(cfg: DictConfig, *, layout: Layout, folder: Path, env: RankEnv) -> int:
    """Trains as one rank of the run, or measures, and returns its exit code; an error is recorded, not raised.

    Args:
        cfg: The resolved config.
        folder: The run folder.

    Returns:
        0 finished, 2 wrong configuration, 1 failed, 143 or 130 stopped by SIGTERM or SIGINT.
    """
    try:
        stopping.install()
        terminal.outlive()
        say_phase(env)
        phase.set_timeout(cfg.strategy.timeout_seconds)
        _configure_logging(folder, env)
        _use_cores(cfg.trainer, env)
        keep_freed_memory()
        result = _job(cfg)(cfg, layout=layout, folder=folder, env=env)
    except stopping.Stop:
        return 128 + (stopping.requested() or signal.SIGTERM)
    except BaseException as error:  # some libraries raise what is no Exception, such as a panic in Rust
        failures.record(folder, rank=env.rank, error=error)
        return 2 if isinstance(error, ConfigError) else 1
    finally:
        phase.enter(phase.LEAVING)
    if result["status"] == "interrupted":
        return 128 + (stopping.requested() or signal.SIGTERM)
    return 0


def say_phase(env: RankEnv) -> None:
    """Lets others see the phase of this rank from now on, where the ranks of a run share a folder."""
    shared = os.environ.get(phase.SCRATCH) if env.store != "env://" else None
    phase.open_file(Path(shared) if shared is not None else None, env.rank)


def _job(cfg: DictConfig) -> Callable[..., dict[str, Any]]:
    """What every rank calls: training, or what the config of a script puts in its place."""
    phase.beat("importing Lightning")
    with without_transformers():
        if "measure" in cfg:
            return trust.find("measure._target_", cfg.measure["_target_"], cfg)
        from sidestream.run import train

        return train


def _configure_logging(folder: Path, env: RankEnv) -> None:
    handlers: list[logging.Handler] = []
    log = folder / f"rank{env.rank}.log"
    # A started rank other than 0 has this file as its stdout.
    if env.rank == 0 or env.store == "env://":
        handlers.append(logging.FileHandler(log, encoding="utf-8"))
    if env.rank == 0 or env.store != "env://":
        handlers.append(logging.StreamHandler(sys.stdout))
    form = f"[%(asctime)s][rank {env.rank}][%(name)s][%(levelname)s] %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, handlers=handlers, force=True)
    if hasattr(signal, "SIGUSR1"):  # the supervisor asks a rank that hangs where it is
        faulthandler.register(signal.SIGUSR1, file=log.open("a"), all_threads=True)


def _use_cores(trainer: DictConfig, env: RankEnv) -> None:
    """Gives this rank its share of the cores. Called before torch is imported: OpenMP looks once."""
    cores = available_cores()
    share = len(cores) // env.local_world_size
    threads = max(1, share) if trainer.threads_per_rank == "auto" else trainer.threads_per_rank
    if trainer.threads_per_rank != "auto" or "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(threads)
        phase.beat("importing torch")
        import torch

        torch.set_num_threads(threads)
    if trainer.pin_cpu and hasattr(os, "sched_setaffinity") and threads <= share:
        os.sched_setaffinity(0, cores[env.local_rank * share : (env.local_rank + 1) * share])


def available_cores() -> list[int]:
    """Returns the numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def main() -> None:
    die_with_parent(signal.SIGKILL)
    terminal.outlive()
    matplotlibrc.ignore()
    env = RankEnv.from_environ()
    try:
        stopping.install()  # a request that comes while torch is imported is not lost
        say_phase(env)
        code = _run(env)
    except stopping.Stop:
        code = 128 + (stopping.requested() or signal.SIGTERM)
    stopping.ignore()
    sys.exit(code)


def _run(env: RankEnv) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    folder = parser.parse_args().folder
    trusted = json.loads(os.environ.get(trust.VARIABLE, "[]"))
    if trusted:
        sys.path.append(os.getcwd())  # as in the process that started this one
    plain = withheld.values(load_resolved(folder), withheld.published())
    cfg = as_config({**plain, trust.KEY: trusted})
    layout = Launch.load(folder).layout
    return run_rank(cfg, layout=layout, folder=folder, env=env)


if __name__ == "__main__":
    main()
