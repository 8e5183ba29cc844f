"""Started by torchrun: rank 0 runs Hydra and tells the others, who never do.

Were every rank to run Hydra, each would evaluate `${now:}` for itself and write a folder of its own.
"""

import json
import os
import platform
import shlex
import signal
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from omegaconf import DictConfig, OmegaConf

from sidestream import cli
from sidestream.config.errors import ConfigError
from sidestream.config.layout import Layout
from sidestream.launch import failures, stopping
from sidestream.launch.record import as_config
from sidestream.launch.worker import RankEnv, run_rank

if TYPE_CHECKING:
    from torch.distributed import Store

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# What starts a command several times -> how many there are, and which one this is.
_TASKS = {
    "srun": ("SLURM_NTASKS", "SLURM_PROCID"),
    "jsrun": ("JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),  # sets those of mpirun, too
    "mpirun": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "mpiexec": ("PMI_SIZE", "PMI_RANK"),
    "mpirun_rsh": ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    "flux run": ("FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
}
_APRUN = "ALPS_APP_PE"  # which one this is of those that aprun started; how many there are it does not say
_ONE_PROCESS = "one process, which starts the ranks, or torchrun on every node"
_KEY = "sidestream/launch"
_TIMEOUT = timedelta(seconds=120)  # rank 0 composes the config meanwhile, from a slow disk at worst
_SECONDS_FOR_CAUSE = 1.0
_SECONDS_OF_ONE_REQUEST = 5.0

store: "Store | None" = None  # for init_process_group; kept alive, rank 0 may be its server
_published = False


def active() -> bool:
    """Whether this process was started by torchrun or something that sets the same variables."""
    return all(name in os.environ for name in _VARIABLES)


def follows() -> bool:
    """Whether this process waits for the config of rank 0."""
    return active() and int(os.environ["RANK"]) > 0


def refuse_tasks(argv: list[str]) -> None:
    """Refuses to be one of several tasks that do not know of each other: each would be a whole run.

    A batch script is one task, whatever was allocated. Of several, the first one explains; the others end in silence.

    Args:
        argv: What the user typed.

    Raises:
        ConfigError: in the first task.
    """
    for starter, (size, number) in _TASKS.items():
        tasks, this = os.environ.get(size, ""), os.environ.get(number, "")
        if (
            not (tasks.isdigit() and this.isdigit() and int(tasks) > 1)
            or active()
            or _is_batch_script(starter)
        ):
            continue
        if int(this) > 0:
            sys.exit(2)
        why = f"{starter} started this command {tasks} times, and each would be a run of its own"
        raise ConfigError(
            size, tasks, why, expected=_ONE_PROCESS, fix=f"run {_command(starter, int(tasks), argv)}"
        )
    number = os.environ.get(_APRUN, "0")
    if number.isdigit() and int(number) > 0 and not active():
        # The first one may be the only one. Where there are more, aprun ends it when these end with an error.
        if int(number) > 1:
            sys.exit(2)
        why = "aprun started this command several times, and each would be a run of its own"
        fix = f"run {shlex.join([*cli.typed('aprun', '-n', '1', 'python'), *argv])}"
        raise ConfigError(_APRUN, number, why, expected=_ONE_PROCESS, fix=fix)


def _is_batch_script(starter: str) -> bool:
    return (
        starter == "srun" and "SLURM_STEP_ID" not in os.environ and os.environ.get("ENVIRONMENT") == "BATCH"
    )


def _command(starter: str, tasks: int, argv: list[str]) -> str:
    counted = {"srun": ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"), "flux run": ("FLUX_JOB_NNODES",)}
    nodes = int(next(filter(None, map(os.environ.get, counted.get(starter, ()))), 1))
    if starter in ("mpirun", "jsrun"):
        nodes = tasks // int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", tasks))
    on_each = (*starter.split(), f"--nodes={nodes}", f"--ntasks={nodes}") if starter in counted else ()
    if nodes == 1:
        given = any(part.startswith("trainer.devices=") for part in argv)
        words = argv if given else [*argv, f"trainer.devices={tasks}"]
        return shlex.join([*cli.typed(*on_each, "python"), *words])
    here = os.environ.get("SLURMD_NODENAME") or platform.node()
    each = ("torchrun", f"--nnodes={nodes}", f"--nproc-per-node={tasks // nodes}", "--rdzv-backend=c10d")
    where = f"--rdzv-endpoint={here}:29500"
    return shlex.join([*cli.typed(*on_each, *each, where), *argv])


def world() -> dict[str, Any]:
    """Returns the arguments of `compatibility.check` that torchrun has decided."""
    if not active():
        return {}
    return {
        "world_size": int(os.environ["WORLD_SIZE"]),
        "local_world_size": int(os.environ["LOCAL_WORLD_SIZE"]),
    }


def follow() -> int:
    """Waits for rank 0's config and trains; returns the exit code. 0 if rank 0 has nothing to train."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's own would answer when the wait is over
    message = json.loads(_meet().get(_KEY))
    _meet().set(f"{_KEY}/read/{os.environ['RANK']}", "1")
    if not message:
        return 0
    cfg = as_config(message["config"])
    return _train(cfg, layout=Layout(**message["layout"]), folder=Path(message["folder"]))


def lead(cfg: DictConfig, *, layout: Layout, folder: Path) -> int:
    """Gives the resolved config to all ranks and trains as rank 0; returns the exit code."""
    _publish(
        {"config": OmegaConf.to_container(cfg, resolve=True), "layout": asdict(layout), "folder": str(folder)}
    )
    return _train(cfg, layout=layout, folder=folder)


def release() -> None:
    """Lets the other ranks go if rank 0 ends without a config to train: `--help`, or an error."""
    if active() and not follows() and not _published:
        _publish({})


def _publish(message: dict) -> None:
    global _published
    _published = True
    _meet().set(_KEY, json.dumps(message))
    if not message:  # without torchrun's agent this process is the server: leave after the last reader
        others = [f"{_KEY}/read/{rank}" for rank in range(1, int(os.environ["WORLD_SIZE"]))]
        if others:
            _meet().wait(others, _TIMEOUT)


def _meet() -> "Store":
    global store
    if store is None:
        from torch.distributed import rendezvous

        store, _, _ = next(iter(rendezvous("env://", timeout=_TIMEOUT)))
    return store


def _train(cfg: DictConfig, *, layout: Layout, folder: Path) -> int:
    env = RankEnv.from_environ("env://")
    folder.mkdir(parents=True, exist_ok=True)  # on another machine
    stopping.install()
    # The agent and whoever stops the whole job both send; the agent kills what does not stop.
    stopping.watch(_give_up, again_after=_SECONDS_OF_ONE_REQUEST, quiet=env.rank > 0)
    try:
        code = run_rank(cfg, layout=layout, folder=folder, env=env)
    except stopping.Stop:
        code = 128 + (stopping.requested() or signal.SIGTERM)
    if code > 128 and env.rank == 0:
        failures.interrupted(folder)
    if code in (1, 2):
        time.sleep(_SECONDS_FOR_CAUSE)  # the rank that caused it may be a moment later
        cause = failures.cause(failures.recorded(folder))
        if cause.rank == env.rank:
            failures.report(folder, cause, world_size=env.world_size, debug=cfg.debug)
    return code


def _give_up(number: int, why: str) -> NoReturn:
    print(f"error: rank {os.environ['RANK']}: {why}", file=sys.stderr, flush=True)
    os._exit(128 + number)


__all__ = ["active", "follow", "follows", "lead", "refuse_tasks", "release", "store", "world"]
