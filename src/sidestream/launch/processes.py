"""Signals and process groups of the processes that we start."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from types import FrameType
from typing import Any

PARENT = "SIDESTREAM_PARENT"  # process id of the starter, set for the processes that must not outlive it
_PR_SET_PDEATHSIG = 1


class Signals:
    """While entered, SIGTERM and SIGINT are only noted, in order, in `received`."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def send(process: subprocess.Popen, number: int) -> None:
    """Sends a signal to a process that we started; one that has ended is left alone."""
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
    parent = os.environ.pop(PARENT, None)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != int(parent):  # it died before the call
        os.kill(os.getpid(), number)
