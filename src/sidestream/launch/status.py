"""What a command does while it has nothing else to show: one rewritten line on a terminal, elsewhere a few plain ones.

The first plain line comes after a second: what is refused at once says nothing else. In the first minute no more than
three seconds are silent. The line on a terminal leaves the cursor at its beginning, so that whoever prints next, also
another process, writes over it.
"""

import atexit
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from sidestream import interrupt
from sidestream.launch import phase

FIRST = 1.0  # seconds after the start, and between lines that say something new
AGAIN = 2.5  # seconds after which the same is said again
MINUTE = 60.0  # seconds; later it is said ever less often
REDRAW = 0.2  # seconds
_NUMBERS = re.compile(r"\d+")
_SHORT = 76  # columns; what is printed over it is longer


class Status:
    """One command's line.

    Args:
        stream: Where to write; a terminal gets one line that changes.
        started: `clock()` at which the command began.
        clock: Seconds.
    """

    def __init__(
        self, stream: TextIO, *, started: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream, self._started, self._clock = stream, started, clock
        self.live = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._doing: Callable[[], str | None] = lambda: None
        self._said: str | None = None
        self._spoke = started
        self._lock = threading.Lock()

    def follow(self, doing: Callable[[], str | None]) -> None:
        """From now on shows what `doing` returns; None: something else is shown just now."""
        self._doing = doing
        if self.live:
            self.draw()

    def draw(self) -> None:
        """Writes what is due."""
        with self._lock:
            doing = self._doing()
            if doing is None:
                return
            now = self._clock()
            elapsed = now - self._started
            if self.live:
                text = f"{doing} ({elapsed:.0f} s)"[: min(_SHORT, shutil.get_terminal_size().columns - 1)]
                if text != self._said:
                    self._said = text
                    self._write(f"\r\x1b[K{text}\r")
                return
            again = AGAIN if elapsed < MINUTE else elapsed / 4
            kind = _NUMBERS.sub("", doing)  # a count that goes on is nothing new
            if now - self._spoke >= (FIRST if kind != self._said else again):
                self._said, self._spoke = kind, now
                self._write(f"{doing} ({elapsed:.0f} s)\n")

    def line(self, text: str) -> None:
        """Prints a line that stays, in place of the changing one."""
        with self._lock:
            self._write(f"\r\x1b[K{text}\n" if self.live else f"{text}\n")
            self._spoke = self._clock()

    def close(self) -> None:
        """Takes the changing line away."""
        self._doing = lambda: None
        with self._lock:
            if self.live and self._said is not None:
                self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # closed: `| head`
            self._doing = lambda: None


_current: Status | None = None
_closed = threading.Event()


def begin(stream: TextIO | None = None) -> None:
    """Starts a command's line.

    Args:
        stream: None: stdout. A command whose stdout is its result takes stderr.
    """
    global _current
    end()
    _current = Status(stream or sys.stdout, started=interrupt.STARTED)
    _closed.clear()
    threading.Thread(target=_redraw, args=(_current,), daemon=True, name="status").start()


def say(doing: str) -> None:
    """Shows what begins now, if there is a line."""
    follow(lambda: doing)


def follow(doing: Callable[[], str | None]) -> None:
    """See `Status.follow`."""
    if _current is not None:
        _current.follow(doing)


def line(text: str) -> None:
    """Prints a line on stdout, in place of the changing one if there is one."""
    if _current is not None:
        _current.line(text)
    else:
        print(text, flush=True)


def of_ranks(phases: Sequence[phase.Phase]) -> str | None:
    """Returns what the ranks of a run are doing; None where they show it themselves.

    Once rank 0 trains, it has a bar on a terminal. Elsewhere it prints lines, and what takes long is said between them.
    """
    first = phases[0]
    if first.name not in phase.BEFORE_TRAINING:
        if _current is not None and _current.live:
            return None
        if first.name == phase.LEAVING:
            return None
        return first.place if time.monotonic() - first.entered >= AGAIN else None
    order = phase.BEFORE_TRAINING
    behind = min(phases, key=lambda p: order.index(p.name) if p.name in order else len(order))
    who = "" if len(phases) == 1 else f"{len(phases)} ranks: "
    if behind.name != first.name:
        who = f"rank {phases.index(behind)}: "
    return f"{who}{behind.doing or behind.place}"


def of_process() -> str:
    """Returns what this process is doing, by its own phase."""
    now = phase.current()
    return now.doing or str(now)


def end() -> None:
    """Takes the line away, for good; before anything else is printed."""
    global _current
    if _current is not None:
        _closed.set()
        _current.close()
        _current = None


def _redraw(status: Status) -> None:
    while not _closed.wait(REDRAW) and status is _current:
        status.draw()


atexit.register(end)

__all__ = ["Status", "begin", "end", "follow", "line", "of_process", "of_ranks", "say"]
