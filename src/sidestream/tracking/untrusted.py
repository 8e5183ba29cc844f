"""Reading what somebody else may have written: run folders, checkpoints, sweeps, model folders.

Such a folder is data. A file is opened only if it is a regular file, inside the folder it is said to be in, and of
bounded size; nothing that is read is ever executed; text is shown only as `printable` returns it.
"""

import io
import json
import os
import stat
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

# Bytes. The largest text of an honest run, a metrics.jsonl of a million steps, is read by lines.
LIMIT = 64 << 20
LINES = 1 << 30  # bytes of a file that is read by lines
LINE = 1 << 20  # bytes of one of them: a record has a number per layer, or per expert and layer

_NEVER_SHOWN = {
    "Cc",
    "Cf",
    "Cs",
    "Co",
    "Zl",
    "Zp",
}  # controls, direction marks, half characters, private use, line ends
_DEEPEST = 100


class Unreadable(ValueError):
    """A file that is not what it should be. The message is one printable line and names the file."""


def read_bytes(path: str | os.PathLike[str], *, inside: Path | None = None, limit: int = LIMIT) -> bytes:
    """Returns the content of a regular file.

    Args:
        path: the file.
        inside: the folder it must lie in once every link is followed; None: anywhere.
        limit: most bytes that are read.

    Raises:
        Unreadable: it is missing, no regular file (a pipe is not waited for), outside of `inside`, or too large.
    """
    with _reading(Path(path), inside) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise Unreadable(f"{printable(path)}: larger than {limit:,} bytes")
    return content


def read_records(
    path: str | os.PathLike[str], *, inside: Path | None = None, limit: int = LINES
) -> tuple[list[dict[str, Any]], str]:
    """Returns the JSON objects of a file that has one in each line, and what was skipped.

    What follows the last newline is what a crash left and is no line. Any other line that is no object, or longer than
    `LINE`, is skipped.

    Returns:
        The objects in their order; and a printable line that counts the skipped ones, empty if there are none.

    Raises:
        Unreadable: as `read_bytes`; `limit` is that of the whole file.
    """
    records: list[dict[str, Any]] = []
    skipped: list[int] = []
    size = number = 0
    with _reading(Path(path), inside) as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise Unreadable(f"{printable(path)}: larger than {limit:,} bytes")
        while line := file.readline(LINE + 1):
            size += len(line)
            if size > limit:
                raise Unreadable(f"{printable(path)}: larger than {limit:,} bytes")
            if not line.endswith(b"\n") and len(line) <= LINE:
                break
            number += 1
            record = _record(line) if line.endswith(b"\n") else None
            if record is not None:
                records.append(record)
            else:
                skipped.append(number)
            while not line.endswith(b"\n") and line and size <= limit:  # the rest of one that is too long
                line = file.readline(LINE)
                size += len(line)
    if not skipped:
        return records, ""
    lines = f"line {skipped[0]}" if len(skipped) == 1 else f"{len(skipped)} lines, the first is {skipped[0]}"
    return records, f"{printable(path)}: skipped what is no JSON object: {lines}"


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        found = parse_json(line.decode("utf-8"))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


@contextmanager
def _reading(path: Path, inside: Path | None) -> Iterator[io.BufferedReader]:
    """Opens a regular file; what fails while it is read is `Unreadable` too."""
    try:
        if inside is not None and not path.resolve().is_relative_to(inside.resolve()):
            raise Unreadable(f"{printable(path)}: leads out of its folder")
        # Without O_NONBLOCK a pipe would be waited for before it can be asked what it is.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise Unreadable(f"{printable(path)}: not a regular file")
            yield file
    except FileNotFoundError:
        raise Unreadable(f"{printable(path)}: missing") from None
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links; a NUL in the name
        if isinstance(error, Unreadable):
            raise
        raise Unreadable(
            f"{printable(path)}: {printable(getattr(error, 'strerror', None) or error)}"
        ) from None


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Opens a file for reading that may be too large for `read_bytes`: a regular one, reached by no link.

    Raises:
        Unreadable: it is missing, a link, or no regular file (a pipe is not waited for).
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        descriptor = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0))
    except (OSError, ValueError) as error:
        why = "a link" if os.path.islink(path) else getattr(error, "strerror", None) or error
        raise Unreadable(f"{printable(path)}: {printable(why)}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Unreadable(f"{printable(path)}: not a regular file")
    return open(descriptor, "rb")


def read_text(path: str | os.PathLike[str], *, inside: Path | None = None, limit: int = LIMIT) -> str:
    """Returns a UTF-8 text file, see `read_bytes`.

    Raises:
        Unreadable: as `read_bytes`, or it is not UTF-8.
    """
    try:
        return read_bytes(path, inside=inside, limit=limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unreadable(f"{printable(path)}: not UTF-8 text (byte {error.start})") from None


def read_json(
    path: str | os.PathLike[str], *, inside: Path | None = None, limit: int = LIMIT
) -> dict[str, Any]:
    """Returns a JSON file that holds an object, see `read_bytes`.

    Raises:
        Unreadable: as `read_text`, or it is no JSON object.
    """
    return _mapping(path, parse_json, read_text(path, inside=inside, limit=limit), "JSON")


def read_yaml(
    path: str | os.PathLike[str], *, inside: Path | None = None, limit: int = LIMIT
) -> dict[str, Any]:
    """Returns a YAML file that holds a mapping, see `read_bytes`. No tags, no aliases: a few lines could fill memory.

    Raises:
        Unreadable: as `read_text`, or it is no plain YAML mapping.
    """
    return _mapping(path, parse_yaml, read_text(path, inside=inside, limit=limit), "YAML")


def parse_json(text: str) -> Any:
    """Returns a JSON value.

    Raises:
        ValueError: no JSON, or nested so deeply that reading it would fail.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_yaml(text: str) -> Any:
    """Returns a YAML value without tags and aliases.

    Raises:
        ValueError: anything else.
    """
    try:
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise ValueError("aliases are not read")
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            if depth > _DEEPEST:
                raise ValueError("nested too deeply")
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from None


def printable(text: object, *, limit: int = 300, keep: str = "") -> str:
    r"""Returns `text` as one line that a terminal shows and never obeys: control characters become `\x1b`, `\n`, ...

    Args:
        text: what is shown.
        limit: most characters; the rest becomes an ellipsis.
        keep: control characters that are shown as they are, such as line ends.
    """
    shown = "".join(
        c if c in keep or unicodedata.category(c) not in _NEVER_SHOWN else _escaped(c) for c in str(text)
    )
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _mapping(path: str | os.PathLike[str], parse: Any, text: str, kind: str) -> dict[str, Any]:
    try:
        content = parse(text)
    except ValueError as error:
        raise Unreadable(f"{printable(path)}: no {kind} ({printable(error, limit=120)})") from None
    if not isinstance(content, dict):
        raise Unreadable(f"{printable(path)}: expected an object, found {type(content).__name__}")
    return content
