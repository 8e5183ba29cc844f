"""Starts the ranks of a run on this machine and watches them. No torch here."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from sidestream.config.compatibility import Layout
from sidestream.launch import failures, phase
from sidestream.launch.processes import PARENT, Signals, kill_group, send
from sidestream.launch.scratch import scratch
from sidestream.launch.stopping import SECONDS_TO_STOP
from sidestream.launch.worker import STORE

STOPPED = (128 + signal.SIGTERM, 128 + signal.SIGINT)  # after a common step
DIED_OF_REQUEST = (-signal.SIGTERM, -signal.SIGINT)  # before it could listen
SECONDS_AFTER_FAILURE = 2.0  # for the other ranks to record what they saw
_POLL_SECONDS = 0.05


@dataclass
class Rank:
    """A started rank and, once it has ended, how."""

    number: int
    process: subprocess.Popen
    returncode: int | None = None
    killed: bool = False  # by us


def supervise(folder: Path, *, layout: Layout, debug: bool = False) -> int:
    """Runs all ranks of a run whose `.hydra/` is written, until the last one has ended.

    The first rank that fails takes the others down. SIGTERM and SIGINT are passed on once, then the ranks have
    `SECONDS_TO_STOP` to stop at a common step; a second signal kills them.

    Returns:
        The exit code of the run: 0, 1, 2, 143 or 130.
    """
    failures.clear(folder)
    with scratch() as shared, Signals() as signals:
        ranks: list[Rank] = []
        try:
            for number in range(layout.world_size):
                ranks.append(_start(folder, number, layout=layout, store=shared / "store"))
            _watch(ranks, signals)
        finally:
            for rank in ranks:
                kill_group(rank.process)
        return _conclude(folder, ranks, signals, debug=debug)


def rank_environment(layout: Layout, *, rank: int, store: Path) -> dict[str, str]:
    """Returns the variables that tell a rank of a one-machine run who it is."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(layout.world_size),
        "LOCAL_WORLD_SIZE": str(layout.world_size),
        "GROUP_RANK": "0",
        phase.SCRATCH: str(store.parent),
        STORE: f"file://{store}",  # a file: no port that another job could have
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback),
    }


def import_path() -> str:
    """Returns PYTHONPATH for a child that imports what this process can import, but for what lies in this folder."""
    paths = [*sys.path[:1], *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return os.pathsep.join(dict.fromkeys(path for path in paths if path))


def _start(folder: Path, number: int, *, layout: Layout, store: Path) -> Rank:
    environment = {
        **os.environ,
        **rank_environment(layout, rank=number, store=store),
        "PYTHONPATH": import_path(),
        PARENT: str(os.getpid()),
    }
    command = [sys.executable, "-P", "-m", "sidestream.launch.worker", "--folder", str(folder)]
    with contextlib.ExitStack() as stack:
        log = None if number == 0 else stack.enter_context((folder / f"rank{number}.log").open("ab"))
        # A session of its own: Ctrl-C reaches the ranks through us, once, and we can end all they started.
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=None if number == 0 else subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return Rank(number, process)


def _watch(ranks: list[Rank], signals: Signals) -> None:
    """Returns when every rank has ended by itself or been killed."""
    deadline = float("inf")
    forwarded = False
    while True:
        running = [rank for rank in ranks if rank.returncode is None]
        for rank in running:
            rank.returncode = rank.process.poll()
            if rank.returncode is None or rank.returncode == 0:
                continue
            patience = SECONDS_TO_STOP if rank.returncode in STOPPED else SECONDS_AFTER_FAILURE
            deadline = min(deadline, time.monotonic() + patience)
        running = [rank for rank in running if rank.returncode is None]
        if not running:
            return
        if signals.received and not forwarded:
            forwarded = True
            deadline = min(deadline, time.monotonic() + SECONDS_TO_STOP)
            for rank in running:
                send(rank.process, signals.received[0])
        if time.monotonic() >= deadline or len(signals.received) > 1:
            _kill(running)
            return
        time.sleep(_POLL_SECONDS)


def _kill(running: list[Rank]) -> None:
    for rank in running:
        if hasattr(signal, "SIGUSR1"):
            send(rank.process, signal.SIGUSR1)  # writes where it hangs to its log
    time.sleep(0.2)
    for rank in running:
        rank.killed = True
        kill_group(rank.process)
        rank.returncode = rank.process.returncode


def _conclude(folder: Path, ranks: list[Rank], signals: Signals, *, debug: bool) -> int:
    found = failures.recorded(folder)
    explained = {failure.rank for failure in found}
    for rank in ranks:
        ended_badly = rank.returncode not in (0, *STOPPED, *DIED_OF_REQUEST) and not rank.killed
        if ended_badly and rank.number not in explained:
            found.append(failures.died(folder, rank=rank.number, returncode=rank.returncode or 0))
    stopped = bool(signals.received) or any(r.returncode in (*STOPPED, *DIED_OF_REQUEST) for r in ranks)
    own_failures = [failure for failure in found if not (stopped and failure.follows_another)]
    if own_failures:
        return failures.report(folder, failures.cause(found), world_size=len(ranks), debug=debug)
    if not stopped:
        return 0
    return _interrupted(folder, ranks, signals)


def _interrupted(folder: Path, ranks: list[Rank], signals: Signals) -> int:
    codes = [rank.returncode or 0 for rank in ranks]
    if not any(codes):
        return 0  # it was finished when the signal came
    if signals.received:
        request = signals.received[0]
    else:  # somebody asked a rank, not us
        request = next(
            code % 128 if code > 0 else -code for code in codes if code in (*STOPPED, *DIED_OF_REQUEST)
        )
    if any(code not in STOPPED for code in codes):
        killed = [str(rank.number) for rank in ranks if rank.killed]
        error = (
            f"rank {', '.join(killed)} did not stop and was killed" if killed else "stopped while starting"
        )
        failures.write_result(folder, error=error, status="interrupted")
        print(f"error: {error}", file=sys.stderr)
    return 128 + request
