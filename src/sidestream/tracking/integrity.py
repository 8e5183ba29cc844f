"""A checkpoint is whole or it is not there: its manifest, and which checkpoint of a run is taken. No torch here.

`manifest.json` is written last, before the folder gets its name: `{"schema": 1, "step": 8, "files": {name: {"bytes":
n, "crc32": hex}}}`. It tells damage from what was written; whoever can write the folder can write it too, so it makes
nobody trusted: what may be read, and how, is `stored.py`.
"""

import os
import re
import stat
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sidestream.config.errors import ConfigError
from sidestream.tracking import stored
from sidestream.tracking.folder import write_json_atomic
from sidestream.tracking.untrusted import Unreadable, open_regular, printable, read_json

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
SCHEMA = 1
OF_A_RUN = (".metadata", "meta.pt")  # without these nothing can go on
LEFTOVER = re.compile(r"\.step-[0-9]+\.(partial|old)")  # of a save, or a removal, that was killed

_NAME = re.compile(r"step-([0-9]{1,15})")
_THREADS = 8
_PIECE = 1 << 20  # bytes read at once


class Damaged(ValueError):
    """A checkpoint that is not what was written. The message is one printable line: the folder, the file and why."""

    def __init__(self, folder: Path, why: str) -> None:
        super().__init__(f"{printable(folder.name)}: {why}")


@dataclass(frozen=True)
class Choice:
    """The checkpoint that is taken.

    Attributes:
        folder: Absolute, `<run>/checkpoints/step-<number>`.
        step: Committed steps in it.
        lines: What the user should know: what was passed over and why.
        passed: Folders that claim to be newer and are damaged.
    """

    folder: Path
    step: int
    lines: list[str] = field(default_factory=list)
    passed: list[Path] = field(default_factory=list)


def checkpoints(run: Path) -> list[Path]:
    """Checkpoints of a run by step, oldest first. Half-written ones have another name; links are none of ours."""
    found = [path for path in (run / FOLDER).glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted((path for path in found if path.is_dir() and not path.is_symlink()), key=step_of)


def step_of(checkpoint: Path) -> int:
    """Committed steps of a checkpoint folder."""
    match = _NAME.fullmatch(checkpoint.name)
    if match is None:
        raise ValueError(f"checkpoint={checkpoint}: expected a folder named step-<number>")
    return int(match.group(1))


def digests(files: Iterable[Path], *, sync: bool = False) -> dict[str, dict[str, Any]]:
    """Returns name -> size and checksum of regular files, read in threads.

    Args:
        sync: Bring them to the disk meanwhile: a disk is waited for, a checksum is computed.

    Raises:
        Unreadable: one is missing, a link, or no file.
    """
    listed = list(files)
    with ThreadPoolExecutor(_THREADS) as readers, ThreadPoolExecutor(_THREADS) as writers:
        written = [writers.submit(_sync, path) for path in listed if sync]
        found = dict(zip((path.name for path in listed), readers.map(_digest, listed)))
        for one in written:
            one.result()
    return found


def _sync(path: Path) -> None:
    with open_regular(path) as file:
        os.fsync(file.fileno())


def _digest(path: Path) -> dict[str, Any]:
    # Against accidents only, and more than twice as fast as any cryptographic one: it hides behind the disk.
    checksum, buffer = 0, memoryview(bytearray(_PIECE))
    with open_regular(path) as file:
        while count := file.readinto(buffer):
            checksum = zlib.crc32(buffer[:count], checksum)
        return {"bytes": file.tell(), "crc32": f"{checksum:08x}"}


def seal(folder: Path, *, step: int, files: dict[str, dict[str, Any]]) -> None:
    """Writes the manifest of a folder whose other files are all there, and brings it to the disk.

    Args:
        files: What `digests` returned for them.
    """
    write_json_atomic(folder / MANIFEST, {"schema": SCHEMA, "step": step, "files": files})


def verify(folder: Path, *, needs: Iterable[str] = OF_A_RUN) -> bool:
    """Checks every file of a checkpoint, and that its tensors lie in these files.

    Args:
        needs: Files that must be there whatever the manifest says.

    Returns:
        Whether it has a manifest. One that an earlier version wrote has none: names, sizes and places are checked
        then, contents are not.

    Raises:
        Damaged: It is not whole.
    """
    sizes = _sizes(folder)
    sealed = sizes.pop(MANIFEST, None) is not None
    try:
        if sealed:
            _compare(folder, sizes)
        for name in needs:
            if not sizes.get(name):
                raise Damaged(folder, f"{name}: {'missing' if name not in sizes else 'empty'}")
        stored.read(folder, sizes=sizes)
    except Unreadable as error:
        raise Damaged(folder, printable(error).removeprefix(f"{printable(folder)}/")) from None
    return sealed


def _sizes(folder: Path) -> dict[str, int]:
    sizes = {}
    try:
        for entry in os.scandir(folder):
            status = entry.stat(follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode):
                what = "a link" if entry.is_symlink() else "no file"
                raise Damaged(folder, f"{printable(entry.name)}: {what}")
            sizes[entry.name] = status.st_size
    except OSError as error:
        raise Damaged(folder, printable(error.strerror or error)) from None
    return sizes


def _compare(folder: Path, sizes: dict[str, int]) -> None:
    manifest = read_json(folder / MANIFEST, inside=folder)
    files, step = manifest.get("files"), manifest.get("step")
    if manifest.get("schema") != SCHEMA:
        raise Damaged(folder, f"{MANIFEST}: schema {printable(manifest.get('schema'))} is unknown here")
    if not isinstance(files, dict) or not all(isinstance(entry, dict) for entry in files.values()):
        raise Damaged(folder, f"{MANIFEST}: no list of files")
    if (match := _NAME.fullmatch(folder.name)) and step != int(match.group(1)):
        raise Damaged(folder, f"{MANIFEST}: it is of step {printable(step)}")
    for name in files:
        if name not in sizes:
            raise Damaged(folder, f"{printable(name)}: missing")
        if (expected := files[name].get("bytes")) != sizes[name]:
            raise Damaged(folder, f"{printable(name)}: {sizes[name]} bytes instead of {printable(expected)}")
    for name in sizes:
        if name not in files:
            raise Damaged(folder, f"{printable(name)}: not written with it")
    for name, found in digests(folder / name for name in files).items():
        if found["crc32"] != files[name].get("crc32"):
            raise Damaged(folder, f"{printable(name)}: its content has changed (checksum)")


def newest_whole(run: Path, *, key: str, strict: bool = False) -> Choice:
    """Returns the newest checkpoint of a run that is whole.

    Args:
        key: What names the run on the command line.
        strict: Refuse if a newer one is damaged, instead of passing it over.

    Raises:
        ConfigError: There is none, naming what is wrong with each; or one is damaged and `strict`.
    """
    named, problems = _named(run / FOLDER)
    passed: list[Path] = []
    chosen: Choice | None = None
    for folder in reversed(named):
        try:
            sealed = _verified(folder, sealed_before=(one / MANIFEST for one in named if one != folder))
        except Damaged as error:
            passed.append(folder)
            problems.append(str(error))
            continue
        note = [] if sealed else [_unsealed(folder, key)]
        chosen = Choice(folder, step_of(folder), note, passed)
        break
    if chosen is None or (strict and problems):
        if not named and not problems:
            why, fix = "the run has no checkpoint yet", "run it again from the start"
        elif chosen is None:
            why, fix = f"no whole checkpoint ({'; '.join(problems)})", "run it again from the start"
        else:
            why, fix = (
                "; ".join(problems),
                f"run without resume.strict=true to go on from {chosen.folder.name}",
            )
        raise ConfigError(key, run, why, expected="a run with a whole checkpoint", fix=fix)
    told = [f"{key}: {FOLDER}/{problem}" for problem in problems]
    if passed:
        told.append(f"{key}: {chosen.folder.name} is the newest whole checkpoint and is taken")
    return Choice(chosen.folder, chosen.step, [*told, *chosen.lines], passed)


def check_given(folder: Path, *, key: str, needs: Iterable[str] = OF_A_RUN) -> list[str]:
    """Verifies a checkpoint that the user named; returns what he should know of it.

    Raises:
        ConfigError: It is damaged.
    """
    try:
        sealed = verify(folder, needs=needs)
    except Damaged as error:
        raise ConfigError(
            key, folder, str(error), expected="a whole checkpoint", fix="name another one"
        ) from error
    return [] if sealed else [_unsealed(folder, key)]


def _unsealed(folder: Path, key: str) -> str:
    why = f"has no {MANIFEST} (an earlier version wrote it): its content is not checked"
    return f"{key}: {printable(folder.name)} {why}"


def resumed(value: str) -> Path:
    """Returns the checkpoint that a resolved `resume` stands for: itself, or the newest whole one of a run folder.

    Raises:
        ConfigError: see `newest_whole`.
    """
    given = Path(value)
    if given.parent.name == FOLDER and _NAME.fullmatch(given.name):
        return given  # chosen and checked before the ranks were started
    return newest_whole(given, key="resume").folder


def _named(folder: Path) -> tuple[list[Path], list[str]]:
    """Returns what claims to be a checkpoint, oldest first, and what has only part of such a name."""
    try:
        entries = sorted(folder.glob("step-*"))
    except OSError:
        entries = []
    odd = [path for path in entries if not _NAME.fullmatch(path.name)]
    named = sorted((path for path in entries if path not in odd), key=step_of)
    return named, [f"{printable(path.name)}: not named step-<number>" for path in odd]


def _verified(folder: Path, *, sealed_before: Iterable[Path]) -> bool:
    if folder.is_symlink():
        raise Damaged(folder, "a link")
    if not verify(folder):
        # An earlier version wrote none, but not after one that does.
        if any(path.exists() and step_of(path.parent) < step_of(folder) for path in sealed_before):
            raise Damaged(folder, f"{MANIFEST}: missing")
        return False
    return True
