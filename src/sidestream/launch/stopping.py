"""The request to stop, as a rank sees it.

The handler only sets a flag; the loop stops at a common step. Before the first step there is nothing to save: there
the handler raises `Stop`. One request often comes as several signals (a process group's, and the same one passed
on), so a second request is one that comes later.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from sidestream.launch import phase
from sidestream.launch.phase import Phase
from sidestream.launch.processes import SAME_REQUEST
from sidestream.launch.silence import Silence

SECONDS_TO_STOP = 25.0  # of silence; saving a checkpoint has the limit of its phase
SECONDS_BEFORE_TRAINING = 4.0  # a rank that waits in a library for another does not hear

_received: int | None = None
_watched: "_Watcher | None" = None


class Stop(BaseException):
    """Asked to stop before the first step."""


def install() -> None:
    """Takes over SIGTERM and SIGINT in this process; a request that came before stays.

    Further signals change nothing: whoever started this process, or `watch`, decides what a second request does.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _note)


def ignore() -> None:
    """A request changes nothing any more: all is written. Python would give up its handlers while it ends."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def requested() -> int | None:
    """Returns the number of the signal that asked this rank to stop, or None.

    Other ranks may have got none, or get theirs later: reduce it over ranks before acting on it.
    """
    return _received


def _note(number: int, frame: FrameType | None) -> None:
    global _received
    if _received is not None:
        return
    _received = number
    if phase.current().name in phase.BEFORE_TRAINING:
        raise Stop


def answer(now: Phase) -> str:
    """What somebody who asks a run in this phase to stop is told at once."""
    places = {
        phase.TRAINING: "after this step",
        phase.VALIDATING: "after this batch of the validation",
        phase.SAVING: "after this checkpoint",
    }
    return f"stopping {places.get(now.name, 'now')} (once more: at once)"


def overdue(silence: Silence, *, asked: float) -> bool:
    """Whether ranks that were asked to stop have had their time.

    Args:
        asked: `time.monotonic()` of the request.
    """
    names = {now.name for now in silence.phases.values()}
    since = time.monotonic() - asked
    if names & {*phase.BEFORE_TRAINING}:
        return since > SECONDS_BEFORE_TRAINING
    if phase.SAVING in names:
        return silence.seconds > silence.limit
    return silence.seconds > SECONDS_TO_STOP or since > max(SECONDS_TO_STOP, silence.limit)


class _Watcher(threading.Thread):
    """Hears signals while the main thread is in a library, answers them, and ends a process that does not stop."""

    def __init__(self, give_up: Callable[[int, str], NoReturn], *, again_after: float, quiet: bool) -> None:
        super().__init__(daemon=True, name="stopping")
        self._give_up, self._again_after, self._quiet = give_up, again_after, quiet
        self._ear, self.mouth = socket.socketpair()
        self.mouth.setblocking(False)
        self._ear.settimeout(0.5)
        self._silence = Silence(lambda: {0: phase.current()}, lambda: {0: os.getpid()})

    def run(self) -> None:
        asked, number = None, 0
        while True:
            heard = b""
            with contextlib.suppress(TimeoutError):
                heard = self._ear.recv(64)
            numbers = [n for n in heard if n in (signal.SIGTERM, signal.SIGINT)]
            now = time.monotonic()
            if numbers and asked is None:
                asked, number = now, numbers[0]
                self._silence.seconds = 0.0
                if not self._quiet:
                    print(answer(phase.current()), file=sys.stderr, flush=True)
            elif numbers and asked is not None and now - asked > self._again_after:
                self._give_up(number, f"stopped at once, in: {phase.current()}")
            if asked is not None:
                self._silence.look()
                if overdue(self._silence, asked=asked):
                    self._give_up(number, f"did not stop and was ended, in: {phase.current()}")


def watch(
    give_up: Callable[[int, str], NoReturn], *, again_after: float = SAME_REQUEST, quiet: bool = False
) -> None:
    """Watches requests to this process, which nobody else does. Once; `install` comes before.

    Args:
        give_up: Called in a thread with the signal and one line; ends the process.
        again_after: Seconds after the first signal from which on one is a second request.
        quiet: Say nothing.
    """
    global _watched
    if _watched is None and threading.current_thread() is threading.main_thread():
        _watched = _Watcher(give_up, again_after=again_after, quiet=quiet)
        signal.set_wakeup_fd(_watched.mouth.fileno(), warn_on_full_buffer=False)
        _watched.start()
