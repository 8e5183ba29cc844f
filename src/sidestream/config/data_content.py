"""What the first bytes of a data file say: an encoding, a container, a type. Pure: neither torch nor NumPy."""

from __future__ import annotations

import codecs
import math
import mmap
import pickletools
import shlex
import struct
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from sidestream.config.errors import ConfigError
from sidestream.tracking.untrusted import parse_json, printable

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
    b"\x04\x22\x4d\x18": "lz4",
    b"7z\xbc\xaf\x27\x1c": "7z",
    b"Rar!\x1a\x07": "RAR",
    b"\xff\xd8\xff": "JPEG",
    b"GIF8": "GIF",
    b"\x7fELF": "ELF",
    b"Obj\x01": "Avro",
}
# Containers of arrays: nobody trains on their bytes, not even as bytes.
_OF_ARRAYS = {"NumPy (.npy)", "Megatron index (.idx)", "Parquet", "Arrow", "HDF5", "pickle", "safetensors"}
_OPERATIONS = 8  # of a pickle, in a row: no array of integers begins so
# What Windows writes in place of controls that Latin-1 text never has: euro, dots, quotes, dashes, trade mark.
_WINDOWS = frozenset(b"\x80\x85\x91\x92\x93\x94\x95\x96\x97\x99")
_WESTERN = ("iso8859-1", "iso8859-15", "cp1252")
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
    if kind := _container(begin):
        raise ConfigError(
            key, str(path), f"a {kind} file, not text", expected="text files", fix=f"{key}=[<text files>]"
        )
    marked = next((name for mark, name in _MARKS.items() if begin.startswith(mark)), None)
    codec = codecs.lookup(encoding).name
    if codec != "utf-8":
        if marked is not None and not codec.startswith(marked):
            raise wrong_encoding(path, f"it begins with the mark of {marked}", encoding, marked)
        check_not_utf8(path, begin, encoding=encoding)
        return
    if marked is None and begin.count(0) > len(begin) // 10:
        marked = "utf-16-le" if begin[1::2].count(0) >= begin[::2].count(0) else "utf-16-be"
    if marked is not None:
        raise wrong_encoding(path, f"it looks like {marked}: zeros between its letters", encoding, marked)
    if replaces:
        check_replaced(path, *_not_utf8(begin), encoding=encoding, likely=western(begin))


def check_replaced(
    where: object, replaced: int, characters: int, *, encoding: str, likely: str | None = None
) -> None:
    """Refuses text of which more than `TOLERATED` is no UTF-8: it is of another encoding, maybe `likely`."""
    if replaced > TOLERATED * characters:
        why = f"{replaced:,} of {characters:,} characters are no UTF-8 and would become U+FFFD"
        raise wrong_encoding(where, why, encoding, likely or "<its encoding>")


def check_not_utf8(path: Path, content: bytes, *, encoding: str) -> None:
    """Refuses UTF-8 that is to be read as something else, which few encodings would notice.

    Raises:
        ConfigError: All of `content` is UTF-8, and it is no coincidence.
    """
    codec = codecs.lookup(encoding).name
    broken, characters = _not_utf8(content)
    if broken or codec.startswith("utf-8"):
        return
    wide = codec.startswith(("utf-16", "utf-32"))
    if wide and characters >= 64 and 0 not in content:  # their spaces and line ends have zeros
        raise wrong_encoding(path, f"it is UTF-8, and no {encoding}", encoding, "utf-8")
    # Two bytes of Shift-JIS may be a character of UTF-8, too; in an alphabet of single bytes such pairs are no word.
    fewest = 1 if len(bytes(range(128, 256)).decode(codec, "replace")) == 128 else 4
    several = sum(byte >= 0xC0 for byte in content)
    if not wide and several >= fewest:
        why = f"{several:,} characters that are not ASCII, and all are UTF-8"
        raise wrong_encoding(path, why, encoding, "utf-8")


def western(content: bytes) -> str | None:
    """The encoding of a Western text of single bytes: few letters are not ASCII, and none is a control."""
    high = [byte for byte in content if byte >= 0x80]
    if len(high) * 3 > len(content):
        return None
    controls = {byte for byte in high if byte < 0xA0}
    if not controls:
        return "latin-1"
    return "cp1252" if controls <= _WINDOWS else None


def what_else(path: Path, *, encoding: str) -> str | None:
    """A note for the user about text that can be read and may not be what he means: another alphabet, JSON lines."""
    begin = peek(path)
    if codecs.lookup(encoding).name in _WESTERN and western(begin) is None:
        return f"{printable(path)}: read as {encoding}, but it does not look like text of a Western alphabet"
    lines = begin.split(b"\n")[:-1][:3]
    if len(lines) == 3 and all(line.startswith(b"{") and _is_object(line) for line in lines):
        how = f"data=huggingface data.dataset=json data.data_files=[{printable(path)}]"
        return f"{printable(path)}: lines of JSON, trained on as they are; {how} reads the text in them"
    return None


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(parse_json(line.decode("utf-8")), dict)
    except ValueError:
        return False


def _container(begin: bytes) -> str | None:
    """What a file is that is neither text nor plain integers."""
    for magic, kind in _CONTAINERS.items():
        if begin.startswith(magic):
            return kind
    if begin[257:262] == b"ustar":
        return "tar"
    if begin[8:10] == b'{"' and 2 < int.from_bytes(begin[:8], "little") < 2**27:
        return "safetensors"
    if begin[:1] == b"\x80" and begin[1:2] in (b"\2", b"\3", b"\4", b"\5"):
        operations = 0
        with suppress(ValueError, IndexError, OverflowError):  # read, never run
            for operation, _, _ in pickletools.genops(begin):
                if operations and operation.name == "PROTO":
                    break
                operations += 1
                if operations == _OPERATIONS or operation.name == "STOP":
                    return "pickle"
    return None


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
    if path.suffix == ".npy":
        return
    raw, fix = "integers and nothing else", f"{key}=<such a file>"
    kind = _container(begin)
    if kind is not None and (dtype != "uint8" or kind in _OF_ARRAYS):
        why = f"a {kind} file" + (" without that suffix" if "NumPy" in kind else "")
        raise ConfigError(key, str(path), why, expected=raw, fix=fix)
    if dtype in (None, "uint8"):
        if wide := _wider(begin, 1):
            raise _wrong_dtype(path, dtype, wide)
        return
    if _is_float(begin):
        raise ConfigError(key, str(path), "floating-point numbers, not tokens", expected=raw, fix=fix)
    if dtype == "uint16" and _is_swapped(begin):
        why = "the first byte of its integers comes before the second: it is big-endian"
        how = f"np.fromfile('{path}', '>u2').astype('<u2').tofile(<a new file>)"
        raise ConfigError(key, str(path), why, expected="little-endian integers", fix=f"run {how}")
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


def _is_float(begin: bytes) -> bool:
    """Whether a file is one of float32 or float64: nearly all of these would be ordinary numbers, and no integers are.

    The upper half of such a number is an integer of few values, and the lower half of any. Tokens do not change so from
    one place to the next.
    """
    for width, letter in ((4, "f"), (8, "d")):
        whole = begin[: len(begin) // width * width]
        numbers = struct.unpack(f"<{len(whole) // width}{letter}", whole)
        lower = struct.unpack(f"<{len(whole) // 2}H", whole)[:: width // 2]
        ordinary = sum(1e-8 < abs(number) < 1e8 or number == 0 for number in numbers)
        zeros = sum(number == 0 for number in numbers)
        alike = sum(0x3200 <= value & 0x7FFF <= 0x4D00 for value in lower)
        if len(numbers) >= 64 and ordinary > 0.99 * len(numbers) > 2 * zeros and alike < 0.9 * len(numbers):
            return True
    return False


def _is_swapped(begin: bytes) -> bool:
    """Whether integers of two bytes are big-endian: what is read as their upper byte takes more values, more evenly."""
    lower, upper = begin[: len(begin) // 2 * 2 : 2], begin[1::2]
    return len(upper) >= 1024 and _entropy(upper) > _entropy(lower) + 1.5


def _entropy(values: bytes) -> float:
    """Of the distribution of single bytes, in bits."""
    counts = Counter(values).values()
    return -sum(count / len(values) * math.log2(count / len(values)) for count in counts)


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
