"""Signals and process groups of the processes that we start."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from types import FrameType
from typing import Any

PARENT = "SIDESTREAM_PARENT"  # process id of the starter, set for the processes that must not outlive it
SAME_REQUEST = 1.0  # seconds within which signals are one request: a group's, and the same one passed on
# A second request from the process that started this one, which may have got the first one twice: as a member of a
# control group, and passed on, at whatever distance.
AT_ONCE = getattr(signal, "SIGUSR2", None)
_PR_SET_PDEATHSIG = 1

_is_child = False  # of one of our processes, which passes requests on


class Signals:
    """While entered, requests to stop (SIGTERM, SIGINT) are only noted, in order, in `received`.

    Several signals that come together are one request.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._noted = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        for number in (signal.SIGTERM, signal.SIGINT, *([AT_ONCE] if AT_ONCE is not None else [])):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == AT_ONCE:
            self.received = [*(self.received[:1] or [signal.SIGTERM]), number]
        elif not self.received or (not _is_child and time.monotonic() - self._noted > SAME_REQUEST):
            self.received.append(number)
            self._noted = time.monotonic()

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def send(process: subprocess.Popen, number: int | None) -> None:
    """Sends a signal to a process that we started; one that has ended is left alone."""
    if number is not None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)


def kill_group(process: subprocess.Popen) -> None:
    """Kills a process started with `start_new_session=True` together with what it started, and reaps it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def die_with_parent(number: int) -> None:
    """Asks Linux to send this process a signal when its starter dies, however it dies.

    Does nothing in a process that nobody of us started, and on systems without this call.
    """
    global _is_child
    parent = os.environ.pop(PARENT, None)
    _is_child = parent is not None
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != int(parent):  # it died before the call
        os.kill(os.getpid(), number)
