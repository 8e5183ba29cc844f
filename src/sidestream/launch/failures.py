"""Which rank's error is the cause, and telling the user. Each failing rank leaves `<run>/failures/rankN.json`."""

import contextlib
import errno
import os
import re
import shlex
import shutil
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from sidestream import cli
from sidestream.config.errors import ConfigError, PlainError
from sidestream.launch import waiting
from sidestream.launch.phase import Phase
from sidestream.launch.record import LAUNCH, Launch
from sidestream.tracking.folder import RunFolder, write_json_atomic
from sidestream.tracking.result import Status, minimal_failed_result
from sidestream.tracking.untrusted import printable, read_json

# What the other ranks see when one goes away: true, but not the cause.
_FOLLOW_UP = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket timeout|timed out|recvvalue failed|failed to recv"
    r"|remote process (has )?(exited|terminated)|no route to host|connectFullMesh|NCCL communicator was aborted"
    r"|PeerLost|no answer within",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Failure:
    """The end of one rank.

    Attributes:
        time: Seconds since the epoch at which it was noticed.
        error: One line.
        traceback: Text, empty for a rank that could not write one.
        config: The cause is the configuration.
    """

    rank: int
    time: float
    error: str
    traceback: str = ""
    config: bool = False

    @property
    def follows_another(self) -> bool:
        return bool(_FOLLOW_UP.search(self.error)) and not self.config


def clear(folder: Path) -> None:
    """Forgets the failures of an earlier start in the same folder."""
    shutil.rmtree(folder / "failures", ignore_errors=True)


def record(folder: Path, *, rank: int, error: BaseException) -> Failure:
    """Leaves the error of this rank where the starting process finds it."""
    config = isinstance(error, ConfigError)
    waited = waiting.explain(error)
    line = traceback.format_exception_only(error)[-1].strip()
    if config or isinstance(error, PlainError):
        line = str(error)
    text = "" if isinstance(error, PlainError) else "".join(traceback.format_exception(error))
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
    shown = "" if waited is not None or full else text
    failure = Failure(rank, time.time(), " ".join((waited or line).split()), shown, config)
    # Where nothing can be written any more, the exit code and what is printed have to do.
    with contextlib.suppress(OSError):
        with (folder / f"rank{rank}.log").open("a", encoding="utf-8") as log:
            log.write(text)
        (folder / "failures").mkdir(exist_ok=True)  # not `parents`: a folder that was removed stays so
        write_json_atomic(folder / "failures" / f"rank{rank}.json", asdict(failure))
    return failure


def died(folder: Path, rank: int, returncode: int, where: Phase) -> Failure:
    """Describes a rank that ended without recording why."""
    if returncode < 0:
        name = signal.Signals(-returncode).name
        hint = " (often: out of memory)" if -returncode == signal.SIGKILL else ""
        error = f"killed by {name}{hint}"
    else:
        error = f"ended with exit code {returncode} and no traceback"
    return Failure(rank, time.time(), f"{error}, in: {where}; see {folder / f'rank{rank}.log'}")


def silent(folder: Path, rank: int, seconds: float, where: Phase, *, stopped: bool) -> Failure:
    """Describes a rank that was given up."""
    how = "stopped by a signal" if stopped else "no sign of life"
    error = f"{how} for {seconds:.0f} s, in: {where}; ended"
    return Failure(rank, time.time(), f"{error}; see {folder / f'rank{rank}.log'}")


def any_recorded(folder: Path) -> bool:
    """Whether a rank has recorded an error."""
    return (folder / "failures").is_dir() and any((folder / "failures").glob("rank*.json"))


def recorded(folder: Path) -> list[Failure]:
    """Returns what the ranks have recorded."""
    files = sorted((folder / "failures").glob("rank*.json"))
    return [Failure(**read_json(file, inside=folder)) for file in files]


def cause(failures: list[Failure]) -> Failure:
    """Returns the earliest failure, of those that are no consequence of another rank's if there are any."""
    return min(failures, key=lambda failure: (failure.follows_another, failure.time))


def report(folder: Path, failure: Failure, *, world_size: int, debug: bool = False) -> int:
    """Shows a failure on stderr, writes result.json and returns the exit code."""
    if not folder.is_dir():
        print(f"error: the run folder was removed while the run wrote in it: {folder}", file=sys.stderr)
        return 1
    if failure.traceback and (debug or not failure.config):
        where = f"rank {failure.rank} of {world_size}" if world_size > 1 else "the run"
        shown = printable(failure.traceback, limit=10 * len(failure.traceback), keep="\n\t")
        print(f"{where} failed in {folder}:\n{shown}", file=sys.stderr)
    prefix = "" if failure.config or world_size == 1 else f"rank {failure.rank}: "
    print(f"error: {prefix}{printable(failure.error, limit=2000)}", file=sys.stderr, flush=True)
    write_result(folder, error=f"{prefix}{failure.error}", status="failed")
    return 2 if failure.config else 1


def interrupted(folder: Path, why: str | None = None) -> None:
    """Completes result.json of a run that was asked to stop, and says how to go on with it.

    Args:
        why: One line if it did not stop by itself.
    """
    found = RunFolder(folder).read_result() or {}
    if why is not None or found.get("status") != "interrupted":
        write_result(folder, error=why or "stopped before the first step", status="interrupted")
    if why is not None:
        print(f"error: {why}", file=sys.stderr)
    print(f"interrupted; {how_to_go_on(folder)}", file=sys.stderr, flush=True)


def how_to_go_on(folder: Path) -> str:
    """Says what to type to go on with a run that has ended early."""
    from sidestream.launch.arguments import quoted  # imports Hydra, which a rank does without

    if not any((folder / "checkpoints").glob("step-*/")):
        return "there is no checkpoint yet: start it again"
    place = os.path.relpath(folder)
    plain = re.fullmatch(r"[\w./-]+", place, re.ASCII) is not None
    word = f"resume={place}" if plain else shlex.quote(f"resume={quoted(place)}")
    return f"go on with: {cli.spelled('python train.py')} {word}"


def write_result(folder: Path, *, error: str, status: Status) -> None:
    """Completes result.json for a run that could not do so itself, where something can be written."""
    launch = Launch.load(folder) if (folder / LAUNCH).exists() else None
    run = RunFolder(folder)
    result = minimal_failed_result(
        run.read_result(),
        error=error,
        status=status,
        command=launch.command if launch else None,
        choices=launch.choices if launch else None,
        world_size=launch.layout.world_size if launch else None,
    )
    with contextlib.suppress(OSError):
        run.write_result(result)
