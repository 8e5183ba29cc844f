"""Runs the jobs of a sweep as process trees, a few at once, each on its own share of the cores."""

import contextlib
import os
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from sidestream.config.errors import ConfigError
from sidestream.launch.processes import AT_ONCE, PARENT, Signals, kill_group, send
from sidestream.launch.worker import available_cores
from sidestream.tracking.sweep import Job
from sidestream.tracking.untrusted import Unreadable, read_json

_OF_A_RANK = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_POLL_SECONDS = 0.05


@dataclass
class _Running:
    job: Job
    place: int
    process: subprocess.Popen
    started: float
    forwarded: int = 0


def shares(count: int) -> list[list[int]]:
    """Returns disjoint shares of the cores that this process may use, all of one size.

    Cores that are left over stay unused: jobs of one sweep are compared with one another.

    Raises:
        ConfigError: there are fewer cores than shares, or less than one share is asked for.
    """
    key, cores = "hydra.launcher.max_concurrent", available_cores()
    if not 1 <= count <= max(1, len(cores)):
        why = f"this process may use {len(cores)} cores" if count > 1 else "nothing would run"
        expected = f"a value from 1 to {len(cores)}"
        raise ConfigError(key, count, why, expected=expected, fix=f"{key}={len(cores) if count > 1 else 1}")
    size = len(cores) // count
    return [cores[place * size : (place + 1) * size] for place in range(count)]


def run(
    jobs: Iterable[Job],
    *,
    command: Callable[[Job], list[str]],
    cores: Sequence[list[int]],
    signals: Signals,
    started: Callable[[Job], None],
    ended: Callable[[Job], None],
) -> None:
    """Runs jobs until the last one has ended, or after a signal, until those that run have ended.

    Requests to stop are passed on to all jobs that run. A job's output goes to `stdout.log` in its folder.

    Args:
        command: Called when a job's turn has come; makes its folder ready and returns what to start.
        cores: One share per job that may run at once. A single one stays unpinned.
        started: Called with each job after its start.
        ended: Called with each job after its end.
    """
    waiting, free = deque(jobs), deque(range(len(cores)))
    running: list[_Running] = []
    try:
        while running or (waiting and not signals.received):
            while waiting and free and not signals.received:
                place = free.popleft()
                share = cores[place] if len(cores) > 1 else None
                running.append(_start(waiting.popleft(), command, place=place, cores=share))
                started(running[-1].job)
            for one in list(running):
                for number in signals.received[one.forwarded :]:
                    send(one.process, AT_ONCE if one.forwarded else number)
                    one.forwarded += 1
                if one.process.poll() is not None:
                    running.remove(one)
                    free.append(one.place)
                    _end(one)
                    ended(one.job)
            time.sleep(_POLL_SECONDS)
    finally:
        for one in running:
            kill_group(one.process)


def _start(job: Job, command: Callable[[Job], list[str]], *, place: int, cores: list[int] | None) -> _Running:
    environment = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}
    environment[PARENT] = str(os.getpid())
    words = command(job)
    job.folder.mkdir(parents=True, exist_ok=True)
    with (job.folder / "stdout.log").open("ab") as log, _only_on(cores):
        job.log_start = log.tell()
        process = subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    job.running = True
    return _Running(job, place, process, started=time.monotonic())


@contextlib.contextmanager
def _only_on(cores: list[int] | None) -> Iterator[None]:
    """Restricts this process for a moment, so that a child it starts is restricted from its first instruction."""
    if cores is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _end(one: _Running) -> None:
    kill_group(one.process)  # what the job started and left behind
    job = one.job
    job.running, job.code, job.seconds = False, one.process.returncode, time.monotonic() - one.started
    job.result = {}
    with contextlib.suppress(Unreadable):
        job.result = read_json(job.folder / "result.json", inside=job.folder)
