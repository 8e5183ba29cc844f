"""The temporary folder of a run: where its ranks meet and say their phase. Gone with it, or with the next start."""

import contextlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PREFIX = "sidestream-"
_OWNER = "owner"  # locked while the process that made the folder lives, whatever ends it
_OLD = 24 * 3600.0  # seconds after which a folder without an owner's file is nobody's


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder for the processes of a run. Removes what runs left whose starting process was killed."""
    clean()
    with (
        tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name,
        contextlib.ExitStack() as held,
    ):
        folder = Path(name)
        if fcntl is not None:
            # Locked before it has its name: nobody finds a folder of a living process unlocked.
            owner = held.enter_context((folder / f".{_OWNER}").open("w"))
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (folder / f".{_OWNER}").rename(folder / _OWNER)
        yield folder


def clean() -> None:
    """Removes the folders of this user whose owner has ended, and those of nobody that are older than a day."""
    with contextlib.suppress(OSError):
        for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):
                if _abandoned(folder):
                    shutil.rmtree(folder, ignore_errors=True)


def _abandoned(folder: Path) -> bool:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or (hasattr(os, "getuid") and status.st_uid != os.getuid()):
        return False
    if fcntl is None or not (folder / _OWNER).is_file():
        return time.time() - status.st_mtime > _OLD
    with (folder / _OWNER).open("r") as owner:
        try:
            fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
