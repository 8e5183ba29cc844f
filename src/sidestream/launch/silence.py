"""How long nothing has been heard of the processes of a run: no beat of a phase, and hardly any time on a core."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sidestream.launch import phase
from sidestream.launch.phase import Phase

SECONDS_AFTER_END = 60.0  # of silence, for the others once the first rank has ended well
_EVERY = 0.5  # seconds between looks
_BUSY = (
    0.02  # share of a core that counts as work; a process that sleeps has less, one that is starved has more
)


@dataclass(frozen=True)
class Process:
    """What the system says about a process.

    Attributes:
        cpu: Seconds on cores so far.
        stopped: It is held by SIGSTOP or a debugger.
    """

    cpu: float
    stopped: bool


def look_at(pid: int) -> Process | None:
    """Returns what Linux says about a process; None elsewhere, and for one that has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    return Process((int(fields[11]) + int(fields[12])) / ticks, fields[0] in ("T", "t"))


class Silence:
    """Measures it by looking often; the time in which nobody looked, because the watcher was stopped, is not counted.

    Args:
        phases: Returns rank -> phase, of the ranks that run.
        pids: Returns rank -> process id of the same ranks.
    """

    def __init__(
        self, phases: Callable[[], Mapping[int, Phase]], pids: Callable[[], Mapping[int, int]]
    ) -> None:
        self._phases, self._pids = phases, pids
        self._looked = time.monotonic()
        self._at_sign: dict[
            int, tuple[Phase, float]
        ] = {}  # rank -> phase and time on cores at its last sign of life
        self.seconds = 0.0
        self.phases: dict[int, Phase] = {}
        self.stopped: list[int] = []

    def look(self) -> None:
        """Does nothing if the last look was a moment ago."""
        now = time.monotonic()
        if now - self._looked < _EVERY and self.phases:
            return
        self.seconds += min(now - self._looked, 4 * _EVERY)
        self._looked = now
        self.phases = dict(self._phases())
        seen = {rank: look_at(pid) for rank, pid in self._pids().items()}
        self.stopped = [rank for rank, process in seen.items() if process is not None and process.stopped]
        current = {
            rank: (phase, process.cpu if (process := seen[rank]) is not None else 0.0)
            for rank, phase in self.phases.items()
        }
        if any(self._lives(rank, *found) for rank, found in current.items()):
            self.seconds, self._at_sign = 0.0, current

    def _lives(self, rank: int, phase: Phase, cpu: float) -> bool:
        before = self._at_sign.get(rank)
        return (
            before is None or phase.beats != before[0].beats or cpu - before[1] > 0.05 + _BUSY * self.seconds
        )

    @property
    def limit(self) -> float:
        """Seconds of silence that are allowed now, in the phases that the ranks are in."""
        return max((phase.limit for phase in self.phases.values()), default=0.0)

    def too_long(self, *, first_end: float | None) -> bool:
        """Whether the ranks that run are to be given up.

        Args:
            first_end: `time.monotonic()` at which a rank has ended well; None: none has.
        """
        names, limit = {now.name for now in self.phases.values()}, self.limit
        if first_end is None or phase.UPLOADING in names:
            return self.seconds > limit
        # One that spins while it leaves is not silent.
        spinning = names == {phase.LEAVING} and time.monotonic() - first_end > 2 * SECONDS_AFTER_END
        return spinning or self.seconds > min(limit, SECONDS_AFTER_END)

    def culprits(self) -> list[int]:
        """Returns the ranks that the others wait for: the stopped ones, else those that are behind."""
        if self.stopped:
            return self.stopped
        least = min((phase.beats for phase in self.phases.values()), default=0)
        return [rank for rank, phase in self.phases.items() if phase.beats == least]


__all__ = ["SECONDS_AFTER_END", "Process", "Silence", "look_at"]
