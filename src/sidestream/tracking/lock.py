"""One process at a time owns a run folder. The lock dies with its process, however that ends."""

import os
import socket
from datetime import UTC, datetime
from pathlib import Path

from sidestream.config.errors import ConfigError
from sidestream.tracking.folder import write_json_atomic
from sidestream.tracking.untrusted import Unreadable, printable, read_json

LOCK = ".hydra/lock"  # nothing is in it; who holds it is told beside it
OWNER = ".hydra/owner.json"

_held: dict[Path, int] = {}  # run folder -> descriptor, open until this process ends


def hold(folder: Path, *, key: str) -> None:
    """Takes a run folder, in which `.hydra` exists, for this process until it ends.

    Where a file system has no locks, a process of this machine that the folder names and that is still there holds it.

    Args:
        key: What names the folder on the command line.

    Raises:
        ConfigError: Another process holds it; it says which.
    """
    folder = folder.resolve()
    if folder in _held:
        return
    try:
        descriptor = _open(folder)
    except OSError as error:
        why, place = (
            f"it cannot be locked ({printable(error.strerror or error)})",
            "a folder that can be written",
        )
        raise ConfigError(key, folder, why, expected=place, fix="copy it to a place of yours") from None
    if not _take(descriptor, folder):
        os.close(descriptor)
        raise _refusal(folder, key, _owner(folder))
    _held[folder] = descriptor
    now = datetime.now(UTC).isoformat(timespec="seconds")
    write_json_atomic(folder / OWNER, {"pid": os.getpid(), "host": socket.gethostname(), "since": now})


def refuse_held(folder: Path, *, key: str) -> None:
    """Raises ConfigError if another process holds a run folder; takes nothing."""
    if owner := owner_of(folder):
        raise _refusal(folder, key, owner)


def _refusal(folder: Path, key: str, owner: str) -> ConfigError:
    why, fix = f"another process trains in this folder: {owner}", "wait for its end, or stop it"
    return ConfigError(key, folder, why, expected="a run that has ended", fix=fix)


def owner_of(folder: Path) -> str | None:
    """Returns who else holds a run folder, None if nobody does."""
    folder = folder.resolve()
    if folder in _held or not (folder / LOCK).exists():
        return None
    try:
        descriptor = _open(folder)
    except OSError:
        return None
    try:
        return None if _take(descriptor, folder) else _owner(folder)
    finally:
        os.close(descriptor)  # and with it the lock, if it was free


def _open(folder: Path) -> int:
    # Never through a link: the file is made, and somebody else may have written the folder.
    return os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)


def _take(descriptor: int, folder: Path) -> bool:
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # a system, or a file system, without locks
        return not _lives(folder)
    return True


def _lives(folder: Path) -> bool:
    """Whether the process that wrote OWNER runs on this machine; of another machine nobody can tell."""
    try:
        owner = read_json(folder / OWNER, inside=folder)
        pid = owner.get("pid")
        if owner.get("host") != socket.gethostname() or type(pid) is not int or pid <= 0:
            return False
        os.kill(pid, 0)
    except (Unreadable, ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # there, and somebody else's
        return True
    return pid != os.getpid()


def _owner(folder: Path) -> str:
    try:
        owner = read_json(folder / OWNER, inside=folder)
    except Unreadable:
        return "it has not said who it is yet"
    pid, host, since = (printable(owner.get(name), limit=80) for name in ("pid", "host", "since"))
    return f"process {pid} on {host}, since {since}"
