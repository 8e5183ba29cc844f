"""Starts the ranks of a run on this machine and watches them. No torch here."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from sidestream.config.layout import Layout
from sidestream.launch import failures, phase, status, stopping
from sidestream.launch.phase import Phase
from sidestream.launch.processes import PARENT, Signals, kill_group, send
from sidestream.launch.scratch import scratch
from sidestream.launch.silence import Silence
from sidestream.launch.worker import STORE

STOPPED = (128 + signal.SIGTERM, 128 + signal.SIGINT)  # after a common step, or before the first
DIED_OF_REQUEST = (-signal.SIGTERM, -signal.SIGINT)  # before it could listen
SECONDS_AFTER_FAILURE = 2.0  # for the other ranks to record what they saw
SECONDS_TO_LEAVE = 30.0  # more, for a rank that failed in nothing and is on its way out
_POLL_SECONDS = 0.05


@dataclass
class RankProcess:
    """A started rank and, once it has ended, how.

    Attributes:
        killed: The supervisor killed it.
        phase: Where it was seen last.
        silent: Seconds without a sign of life after which it was given up.
        stopped: It was held by SIGSTOP or a debugger when it was given up.
    """

    number: int
    process: subprocess.Popen
    returncode: int | None = None
    killed: bool = False
    phase: Phase = field(default_factory=Phase)
    silent: float | None = None
    stopped: bool = False


def supervise(folder: Path, *, layout: Layout, debug: bool = False) -> int:
    """Runs all ranks of a run whose `.hydra/` is written, until the last one has ended.

    The first rank that fails takes the others down, and so does one that gives no sign of life for as long as its
    phase allows. A request to stop (SIGTERM, SIGINT) is passed on, and the ranks stop at a common step; a second one
    kills them. A rank that somebody else asked to stop takes the others with it.

    Returns:
        The exit code of the run: 0, 1, 2, 143 or 130.
    """
    failures.clear(folder)
    with scratch() as shared, Signals() as signals:
        ranks: list[RankProcess] = []
        try:
            for number in range(layout.world_size):
                ranks.append(_start(folder, number, layout=layout, store=shared / "store"))
            status.follow(lambda: status.of_ranks([phase.read(shared, rank.number) for rank in ranks]))
            _Watch(folder, ranks, signals, shared).until_the_end()
        finally:
            status.end()
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


def _start(folder: Path, number: int, *, layout: Layout, store: Path) -> RankProcess:
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
    return RankProcess(number, process)


class _Watch:
    """Follows ranks until each has ended by itself or been killed."""

    def __init__(self, folder: Path, ranks: list[RankProcess], signals: Signals, shared: Path) -> None:
        self._folder, self._ranks, self._signals, self._shared = folder, ranks, signals, shared
        self._silence = Silence(
            lambda: {rank.number: phase.read(shared, rank.number) for rank in self._running},
            lambda: {rank.number: rank.process.pid for rank in self._running},
        )
        self._deadline = float("inf")
        self._asked: float | None = None  # when
        self._first_end: float | None = None  # with 0

    @property
    def _running(self) -> list[RankProcess]:
        return [rank for rank in self._ranks if rank.returncode is None]

    def until_the_end(self) -> None:
        while self._running:
            for rank in self._running:
                rank.returncode = rank.process.poll()
                if rank.returncode is not None:
                    self._ended(rank, rank.returncode)
            if self._deadline == float("inf") and failures.any_recorded(self._folder):
                # It may need long to end: a library waits for what is under way.
                self._deadline = time.monotonic() + SECONDS_AFTER_FAILURE
            if self._signals.received and self._asked is None:
                now = phase.read(self._shared, 0)
                print(stopping.answer(now), file=sys.stderr, flush=True)
                self._ask(self._signals.received[0])
            self._silence.look()
            late = time.monotonic() - self._deadline
            ends = late >= 0 and (late >= SECONDS_TO_LEAVE or not self._someone_leaves())
            if ends or len(self._signals.received) > 1 or self._given_up():
                self._kill()
                return
            time.sleep(_POLL_SECONDS)

    def _someone_leaves(self) -> bool:
        """Whether a rank that failed in nothing is on its way out: how it ends says why the others failed."""
        failed = {failure.rank for failure in failures.recorded(self._folder)}
        return any(
            rank.number not in failed and phase.read(self._shared, rank.number).name == phase.LEAVING
            for rank in self._running
        )

    def _ended(self, rank: RankProcess, code: int) -> None:
        now = time.monotonic()
        rank.phase = phase.read(self._shared, rank.number)
        if code == 0:
            self._first_end = self._first_end or now
        elif code in (*STOPPED, *DIED_OF_REQUEST):
            self._ask(code % 128 if code > 0 else -code)
        else:
            self._deadline = min(self._deadline, now + SECONDS_AFTER_FAILURE)

    def _ask(self, number: int) -> None:
        """Passes a request on, once."""
        if self._asked is not None:
            return
        self._asked, self._silence.seconds = time.monotonic(), 0.0
        for rank in self._running:
            # Before it listens, SIGINT would be a traceback.
            listens = phase.read(self._shared, rank.number).entered
            send(rank.process, number if listens else signal.SIGTERM)

    def _given_up(self) -> bool:
        silence = self._silence
        if self._asked is not None:
            if not stopping.overdue(silence, asked=self._asked):
                return False
        elif not silence.too_long(first_end=self._first_end):
            return False
        for rank in self._running:
            if rank.number in silence.culprits():
                rank.silent, rank.stopped = silence.seconds, rank.number in silence.stopped
        return True

    def _kill(self) -> None:
        running = self._running
        for rank in running:
            rank.phase = phase.read(self._shared, rank.number)
            if hasattr(signal, "SIGUSR1"):
                send(rank.process, signal.SIGUSR1)  # writes where it hangs to its log
        time.sleep(0.2)
        for rank in running:
            rank.killed = rank.process.poll() is None
            kill_group(rank.process)
            rank.returncode = rank.process.returncode


def _conclude(folder: Path, ranks: list[RankProcess], signals: Signals, *, debug: bool) -> int:
    found = failures.recorded(folder)
    explained = {failure.rank for failure in found}
    for rank in ranks:
        ended_badly = rank.returncode not in (0, *STOPPED, *DIED_OF_REQUEST) and not rank.killed
        if ended_badly and rank.number not in explained:
            found.append(failures.died(folder, rank.number, rank.returncode or 0, rank.phase))
    stopped = bool(signals.received) or any(r.returncode in (*STOPPED, *DIED_OF_REQUEST) for r in ranks)
    if not stopped:
        found += [
            failures.silent(folder, rank.number, rank.silent, rank.phase, stopped=rank.stopped)
            for rank in ranks
            if rank.silent is not None
        ]
    own_failures = [failure for failure in found if not (stopped and failure.follows_another)]
    if own_failures:
        return failures.report(folder, failures.cause(found), world_size=len(ranks), debug=debug)
    if not stopped:
        return 0
    return _interrupted(folder, ranks, signals)


def _interrupted(folder: Path, ranks: list[RankProcess], signals: Signals) -> int:
    codes = [rank.returncode or 0 for rank in ranks]
    if not any(codes):
        return 0  # it was finished when the signal came
    if signals.received:
        request = signals.received[0]
    else:  # somebody asked a rank, not us
        request = next(
            code % 128 if code > 0 else -code for code in codes if code in (*STOPPED, *DIED_OF_REQUEST)
        )
    why = None
    if killed := [rank for rank in ranks if rank.killed]:
        late = [rank for rank in killed if rank.silent is not None] or killed
        places = ", ".join(f"rank {rank.number} in: {rank.phase}" for rank in late)
        at_once = len(signals.received) > 1
        why = f"stopped at once ({places})" if at_once else f"did not stop and was killed ({places})"
    failures.interrupted(folder, why)
    return 128 + request
