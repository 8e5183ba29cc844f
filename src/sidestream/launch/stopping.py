"""The request to stop, as a rank sees it. The handler only sets a flag; the loop stops at a common step."""

import os
import signal
import threading
from types import FrameType

SECONDS_TO_STOP = 25.0

_received: int | None = None
_hard_stop: float | None = None


def install(*, hard_stop: float | None = None) -> None:
    """Takes over SIGTERM and SIGINT in this process; a request that came before stays.

    Args:
        hard_stop: Seconds after a request at which the process ends itself if it is still there; None leaves
            that to the process that started it.
    """
    global _hard_stop
    _hard_stop = hard_stop
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _note)


def requested() -> int | None:
    """Returns the number of the signal that asked this rank to stop, or None.

    Other ranks may have got none, or get theirs later: reduce it over ranks before acting on it.
    """
    return _received


def _note(number: int, frame: FrameType | None) -> None:
    global _received
    if _received == number:  # asked twice: at once
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return
    _received = _received or number
    if _hard_stop is not None:
        timer = threading.Timer(_hard_stop, os._exit, [128 + number])
        timer.daemon = True
        timer.start()
