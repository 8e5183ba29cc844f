"""Ctrl-C while a command is still importing or composing: one line, exit code 130, at once.

Imported first by every command, and imports nothing that takes time. An exception would be swallowed, or turned into
another one, by whatever is being imported; there is nothing to clean up yet.
"""

import os
import signal
import time
from types import FrameType

from sidestream import matplotlibrc

STARTED = time.monotonic()  # of this command


def leave_at_once() -> None:
    """Until another handler is set, Ctrl-C ends this process with one line."""
    signal.signal(signal.SIGINT, _leave)
    matplotlibrc.ignore()


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(2, b"\nerror: interrupted\n")
    os._exit(128 + number)
