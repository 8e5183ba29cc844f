"""What the first bytes of a data file say: an encoding, a container, a type. Pure: neither torch nor NumPy."""

from __future__ import annotations

import codecs
import mmap
import shlex
from collections.abc import Sequence
from pathlib import Path

from sidestream.config.errors import ConfigError
from sidestream.tracking.untrusted import printable

TOLERATED = 1e-3  # share of characters that may be no UTF-8 where a tokenizer has to replace them
PEEK = 2**16
_SEARCHED = 64 * 2**20  # bytes in which a separator is searched before ranks start
_WIDTHS = {"uint8": 1, "uint16": 2, "uint32": 4, "int32": 4, "int64": 8}
_PRINTED = frozenset(b"\t\n\r" + bytes(range(32, 127)) + bytes(range(128, 256)))  # UTF-8 and Latin-1, too
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_CONTAINERS = {
    b"\x1f\x8b\x08": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"PK\x03\x04": "zip",
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
    b"\x93NUMPY": "NumPy (.npy)",
    b"MMIDIDX": "Megatron index (.idx)",
    b"\x89PNG": "PNG",
    b"\x89HDF": "HDF5",
    b"%PDF": "PDF",
    b"SQLite format 3": "SQLite",
    b"\x80\x04\x95": "pickle",
    b"\x80\x05\x95": "pickle",
}
# The first of 256 int32 in front of the tokens that llm.c and its descendants write.
_LLM_C = {(20240520).to_bytes(4, "little"), (20240801).to_bytes(4, "little")}


def peek(path: Path) -> bytes:
    """The first bytes of a file; none of one that cannot be read, which is somebody else's refusal."""
    try:
        with path.open("rb") as file:
            return file.read(PEEK)
    except OSError:
        return b""


def check_text(key: str, path: Path, *, encoding: str, replaces: bool) -> None:
    """Refuses a file that is no text in `encoding`.

    Args:
        key: What names the file.
        path: The file.
        encoding: `data.encoding`.
        replaces: The tokenizer cannot keep what is no UTF-8.

    Raises:
        ConfigError: It is a container, of another encoding, or, where it is to be UTF-8, full of what is not.
    """
    begin = peek(path)
    for magic, kind in _CONTAINERS.items():
        if begin.startswith(magic):
            raise ConfigError(
                key, str(path), f"a {kind} file, not text", expected="text files", fix=f"{key}=[<text files>]"
            )
    marked = next((name for mark, name in _MARKS.items() if begin.startswith(mark)), None)
    codec = codecs.lookup(encoding).name
    if codec != "utf-8":
        if marked is not None and not codec.startswith(marked):
            raise wrong_encoding(path, f"it begins with the mark of {marked}", encoding, marked)
        return
    if marked is None and begin.count(0) > len(begin) // 10:
        marked = "utf-16-le" if begin[1::2].count(0) >= begin[::2].count(0) else "utf-16-be"
    if marked is not None:
        raise wrong_encoding(path, f"it looks like {marked}: zeros between its letters", encoding, marked)
    if replaces:
        check_replaced(path, *_not_utf8(begin), encoding=encoding)


def check_replaced(where: object, replaced: int, characters: int, *, encoding: str) -> None:
    """Refuses text of which more than `TOLERATED` is no UTF-8: it is of another encoding."""
    if replaced > TOLERATED * characters:
        why = f"{replaced:,} of {characters:,} characters are no UTF-8 and would become U+FFFD"
        raise wrong_encoding(where, why, encoding, "latin-1")


def wrong_encoding(where: object, why: str, encoding: str, likely: str) -> ConfigError:
    return ConfigError(
        "data.encoding",
        encoding,
        f"{where}: {why}",
        expected="the encoding that the files were written in",
        fix=f"data.encoding={likely}",
    )


def check_encoding(encoding: str) -> None:
    """Refuses what names no encoding of text.

    Raises:
        ConfigError: Python has no such codec, or it is none from bytes to text.
    """
    try:
        codecs.lookup(encoding)
        "".encode(encoding)
    except (LookupError, ValueError):
        expected = "an encoding that Python knows, such as utf-8, latin-1, cp1252 or utf-16"
        raise ConfigError(
            "data.encoding", encoding, "no encoding of text", expected=expected, fix="data.encoding=utf-8"
        ) from None


def check_separator(separator: str | None, files: Sequence[Path], *, encoding: str) -> None:
    """Refuses an empty separator, and one that is in none of the files, if they are small enough to be searched.

    Raises:
        ConfigError: See above; a separator that the files do hold is proposed.
    """
    if separator is None:
        return
    if not separator:
        why = "nothing is between all characters"
        raise ConfigError(
            "data.separator", "''", why, expected="null, or text between documents", fix="data.separator=null"
        )
    if sum(file.stat().st_size for file in files) <= _SEARCHED and not _occurs(separator, files, encoding):
        raise never_occurs(separator, files, encoding=encoding)


def never_occurs(separator: str, files: Sequence[Path], *, encoding: str) -> ConfigError:
    """The refusal of a separator that is in no file, with the spelling that is."""
    unix = separator.replace("\r\n", "\n").replace("\\r\\n", "\n").replace("\\n", "\n").replace("\\t", "\t")
    spellings = (unix, unix.replace("\n", "\r\n"), unix.strip(), separator.lower(), separator.upper())
    near = [spelling for spelling in dict.fromkeys(spellings) if spelling not in ("", separator)]
    found = next((spelling for spelling in near if _occurs(spelling, files, encoding)), None)
    # Hydra takes backslashes as they are: the one way to type a line end is the shell's $'...'.
    typed = "null" if found is None else '"' + found.replace('"', '\\"') + '"'
    override = f"data.separator={typed}"
    if not override.isprintable():
        override = "$'" + override.encode("unicode_escape").decode("ascii").replace("'", "\\'") + "'"
    elif found is not None:
        override = shlex.quote(override)
    return ConfigError(
        "data.separator",
        printable(separator),
        f"in none of {len(files)} files, so each would be one document",
        expected="text that ends a document" + (f"; {printable(found)} is in them" if found else ""),
        fix=override,
    )


def check_tokens(key: str, path: Path, dtype: str | None) -> None:
    """Refuses a raw file that is no array of `dtype`, as far as its beginning tells.

    Raises:
        ConfigError: It is a container, text, has a header, or its integers have another width.
    """
    begin = peek(path)
    if path.suffix == ".npy" or dtype is None or (dtype == "uint8" and not begin.startswith(b"\x93NUMPY")):
        if path.suffix != ".npy" and (wide := _wider(begin, 1)):
            raise _wrong_dtype(path, dtype, wide)
        return
    raw, fix = "integers and nothing else", f"{key}=<such a file>"
    for magic, kind in _CONTAINERS.items():
        if begin.startswith(magic):
            why = f"a {kind} file" + (" without that suffix" if "NumPy" in kind else "")
            raise ConfigError(key, str(path), why, expected=raw, fix=fix)
    if begin[:4] in _LLM_C:
        why = "a header of 1,024 bytes, as llm.c writes it, is in front of the tokens"
        fix = f"run tail -c +1025 {path} > <a new file>, and {fix}"
        raise ConfigError(key, str(path), why, expected=raw, fix=fix)
    if len(begin) >= 1024 and _PRINTED.issuperset(begin):
        raise ConfigError(
            key, str(path), "text, not tokens", expected=raw, fix=f"data=text data.files=[{path}]"
        )
    if wide := _wider(begin, _WIDTHS[dtype]):
        raise _wrong_dtype(path, dtype, wide)


def _wrong_dtype(path: Path, dtype: str | None, wide: int) -> ConfigError:
    likely = {2: "uint16", 4: "uint32", 8: "int64"}[wide]
    why = f"of {path} only every {wide // _WIDTHS[str(dtype)]}. value is not zero: its integers have {wide} bytes"
    return ConfigError(
        "data.dtype",
        dtype,
        why,
        expected="the dtype that the file was written with",
        fix=f"data.dtype={likely}",
    )


def _wider(begin: bytes, width: int) -> int | None:
    """Bytes per integer, if the file looks as if it were more than `width`: upper halves are zero."""
    for wide in (8, 4, 2):
        if wide <= width or len(begin) < 64 * wide:
            continue
        upper = [begin[place::wide] for place in range(width, wide)]
        lower = [begin[place::wide] for place in range(width)]
        if not any(map(any, upper)) and sum(map(any, zip(*lower))) > len(begin) // wide // 2:
            return wide
    return None


def _not_utf8(begin: bytes) -> tuple[int, int]:
    """How many characters at the beginning of a file are no UTF-8, and how many there are."""
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(begin)  # not final: the cut is no fault
    return text.count("\ufffd") - begin.count("\ufffd".encode()), len(text)


def _occurs(separator: str, files: Sequence[Path], encoding: str) -> bool:
    try:
        wanted = separator.encode(encoding).removeprefix("".encode(encoding))  # without the mark of utf-16
    except UnicodeEncodeError:
        return False
    for path in files:
        if path.stat().st_size:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                if content.find(wanted) >= 0:
                    return True
    return False
