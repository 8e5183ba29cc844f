"""In which phase a rank is, so that whoever watches it can say where it hangs, and how long it may.

A rank says it with `enter` and `beat`; they write into a small mapped file, which `read` finds also when the rank is
stopped, hangs in a library or is dead. Without a folder (torchrun, tests) the same is kept in memory.
"""

import contextlib
import mmap
import os
import struct
import time
from dataclasses import dataclass, replace
from pathlib import Path

SCRATCH = "SIDESTREAM_SCRATCH"  # the folder that the starting process and its ranks share

STARTING = "starting"
READING = "reading the data"
BUILDING = "building the model"
MEETING = "meeting the other ranks"
LOADING = "loading the checkpoint"
TRAINING = "training"
VALIDATING = "validating"
SAVING = "saving a checkpoint"
MEASURING = "measuring"  # scripts only
SAMPLING = "writing a sample"  # eval.py only
FINISHING = "finishing"
UPLOADING = "finishing the loggers"
LEAVING = "leaving"

BEFORE_TRAINING = (STARTING, READING, BUILDING, MEETING, LOADING)  # a stop here leaves nothing that is lost
GRACE = 15.0  # seconds beyond the time-out of the groups, whose own error says more

# Seconds without a sign of life that are allowed at least: nobody waits in a group there, and disks are slow.
_AT_LEAST = {STARTING: 120.0, READING: 600.0, BUILDING: 600.0, LOADING: 600.0, UPLOADING: 600.0}
_LEAVING = 30.0

# turn (odd while it is written), beats, step, process, entered, time-out, name, what it does
_LAYOUT = struct.Struct("<QQqqdd48s96s")
_BEATS = struct.Struct("<Q")
_NO_STEP = -1


@dataclass(frozen=True)
class Phase:
    """Where a rank is.

    Attributes:
        name: One of the names above.
        step: The training step that it attempts, the one after which it validates or saves; None elsewhere.
        doing: What it did last, such as `dispatch`; may be empty.
        beats: Signs of life so far, equal on ranks that have done the same.
        entered: `time.monotonic()` at which it began, the same clock in all processes of a machine.
        timeout: Time-out of the process groups, in seconds.
        pid: Process id of the rank; 0 before it has said anything.
    """

    name: str = STARTING
    step: int | None = None
    doing: str = ""
    beats: int = 0
    entered: float = 0.0
    timeout: float = 0.0
    pid: int = 0

    @property
    def limit(self) -> float:
        """Seconds without a sign of life after which a rank is given up."""
        return _LEAVING if self.name == LEAVING else max(self.timeout + GRACE, _AT_LEAST.get(self.name, 0.0))

    @property
    def place(self) -> str:
        """`training step 12`, `validating at step 12`, `reading the data`."""
        if self.step is None:
            return self.name
        return f"{self.name} {'' if self.name == TRAINING else 'at '}step {self.step}"

    def __str__(self) -> str:
        """The place, and what it did last: `training step 12 (dispatch)`."""
        return f"{self.place} ({self.doing})" if self.doing else self.place


_memory: mmap.mmap | bytearray = bytearray(_LAYOUT.size)
_now = Phase()
_beats = 0


def open_file(scratch: Path | None, rank: int) -> None:
    """From now on this process says its phase in a file of `scratch`, or in its memory only.

    A disk without room, or a folder that is gone, is no reason for a run to fail.
    """
    global _memory
    _memory = bytearray(_LAYOUT.size)
    now = replace(_now, entered=_now.entered or time.monotonic(), pid=os.getpid())
    if scratch is not None:
        with contextlib.suppress(OSError), _file(scratch, rank).open("w+b") as file:
            file.write(bytes(_LAYOUT.size))  # written, not only reserved: a full disk would be a SIGBUS later
            file.flush()
            _memory = mmap.mmap(file.fileno(), _LAYOUT.size)
    _write(now)


def enter(name: str, *, step: int | None = None) -> None:
    """Begins a phase of this rank."""
    _write(replace(_now, name=name, step=step, doing="", entered=time.monotonic()))


def set_timeout(seconds: float) -> None:
    """Says how long this rank's groups wait for one another."""
    _write(replace(_now, timeout=seconds))


def beat(doing: str | None = None) -> None:
    """A sign of life. Ranks of a run give theirs at the same points, so a smaller number is a rank that is behind.

    Args:
        doing: What begins now; None: as before.
    """
    global _beats
    if doing is not None and doing != _now.doing:
        _write(replace(_now, doing=doing))
        return
    _beats += 1
    _BEATS.pack_into(_memory, _BEATS.size, _beats)


def current() -> Phase:
    """The phase of this process."""
    return replace(_now, beats=_beats)


def read(scratch: Path, rank: int) -> Phase:
    """Returns the phase of a rank that says it in `scratch`; `STARTING` before it has said one."""
    found = b""
    with contextlib.suppress(OSError):
        for _ in range(3):
            found = _file(scratch, rank).read_bytes()
            if found[:1] and not found[0] % 2:
                break
    if len(found) < _LAYOUT.size:
        return Phase()
    _, beats, number, pid, entered, timeout, *texts = _LAYOUT.unpack(found)
    name, doing = (text.rstrip(b"\0").decode("utf-8", "replace") for text in texts)
    step = None if number == _NO_STEP else number
    return Phase(name or STARTING, step, doing, beats, entered, timeout, pid)


def others(world_size: int) -> dict[int, Phase]:
    """Returns the phases of all ranks of this run, where they share a folder; empty elsewhere."""
    scratch = os.environ.get(SCRATCH)
    return {} if scratch is None else {rank: read(Path(scratch), rank) for rank in range(world_size)}


def _write(phase: Phase) -> None:
    global _now, _beats
    _now = phase
    _beats += 1
    turn = _BEATS.unpack_from(_memory)[0] | 1
    step = _NO_STEP if phase.step is None else phase.step
    texts = phase.name.encode()[:48], phase.doing.encode()[:96]
    _BEATS.pack_into(_memory, 0, turn)
    _LAYOUT.pack_into(_memory, 0, turn, _beats, step, phase.pid, phase.entered, phase.timeout, *texts)
    _BEATS.pack_into(_memory, 0, turn + 1)


def _file(scratch: Path, rank: int) -> Path:
    return scratch / f"phase{rank}"
