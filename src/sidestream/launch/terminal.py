"""Output that outlives its reader: `| head`, a closed window or a lost connection do not end a training run."""

import contextlib
import errno
import io
import os
import signal
import sys
from typing import Any

_GONE = (errno.EPIPE, errno.EIO, errno.ENXIO, errno.ESHUTDOWN, errno.ECONNRESET)


class _Lasting(io.FileIO):
    """Writes to a descriptor until nobody is there to read; then it throws away."""

    def write(self, content: Any) -> int:
        try:
            return super().write(content) or 0
        except OSError as error:
            if error.errno not in _GONE:
                raise
        # The descriptor itself: what libraries write to it must not fail either.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self.fileno())
        return len(memoryview(content).cast("B"))


def outlive(*, hangup: bool = True) -> None:
    """From now on this process goes on when the reader of its output, or its terminal, is gone. Call it early.

    Args:
        hangup: Also when a closed terminal says so (SIGHUP).
    """
    if hangup and hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # also in what it starts
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        buffer = getattr(stream, "buffer", None)
        raw = getattr(buffer, "raw", buffer)  # none between with PYTHONUNBUFFERED
        if type(raw) is io.FileIO:
            with contextlib.suppress(OSError, ValueError):  # no descriptor: a test, a notebook
                if stream.fileno() == number:
                    stream.flush()
                    setattr(sys, name, _lasting(stream, number))


def _lasting(stream: Any, number: int) -> io.TextIOWrapper:
    raw = _Lasting(number, "wb", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


__all__ = ["outlive"]
