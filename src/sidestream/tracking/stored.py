"""What torch's distributed checkpoints say about themselves in `.metadata`, read as data. No torch here.

The file is a pickle, and a pickle may call anything. This one is read into inert records: the few names that an honest
file mentions become stand-ins that keep what they were given, any other name ends the reading. What comes out is
checked before somebody allocates or opens what it says: tensors are as large as their parts, parts lie in files of this
folder, and a file holds what it is said to hold.
"""

import io
import math
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sidestream.tracking.untrusted import Unreadable, printable, read_bytes

NAME = ".metadata"
LIMIT = 256 << 20  # bytes; about 200 for each part of a tensor

_DATA_FILE = re.compile(r"__[0-9]+_[0-9]+\.distcp")
_ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
}


@dataclass(frozen=True)
class Place:
    """Bytes `start` to `start + length` of a file of the folder."""

    file: str
    start: int
    length: int


@dataclass(frozen=True)
class TensorPart:
    """A box of a tensor: where it begins, how large it is, and where it is stored."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place


@dataclass(frozen=True)
class StoredTensor:
    """A tensor: torch's name of its dtype, and parts that add up to it."""

    dtype: str
    size: tuple[int, ...]
    parts: tuple[TensorPart, ...]


@dataclass(frozen=True)
class Stored:
    """The content of a checkpoint.

    Attributes:
        tensors: Name -> tensor.
        values: Everything else by name, such as an optimizer's settings.
        paths: Name -> keys that lead to it in the nested state; all of `tensors` and `values`.
    """

    tensors: dict[str, StoredTensor]
    values: dict[str, Place]
    paths: dict[str, tuple[str | int, ...]]


class _Record:
    """In place of whatever the pickle names: keeps what it was called with and the state it was given."""

    __slots__ = ("arguments", "state")
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> "_Record":
        record = object.__new__(cls)
        record.arguments, record.state = arguments, None
        return record

    # Always there, so that a state is never spread over attributes.
    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Metadata(_Record):
    __slots__ = ()


class _Index(_Record):
    __slots__ = ()


class _StorageInfo(_Record):
    __slots__ = ()


class _Tensor(_Record):
    __slots__ = ()


class _Bytes(_Record):
    __slots__ = ()


class _Size(_Record):
    __slots__ = ()


_METADATA = "torch.distributed.checkpoint.metadata"
_STANDS_FOR: dict[tuple[str, str], Any] = {
    (_METADATA, "Metadata"): _Metadata,
    (_METADATA, "MetadataIndex"): _Index,
    (_METADATA, "TensorStorageMetadata"): _Tensor,
    (_METADATA, "BytesStorageMetadata"): _Bytes,
    (_METADATA, "TensorProperties"): _Record,
    (_METADATA, "ChunkStorageMetadata"): _Record,
    (_METADATA, "StorageMeta"): _Record,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _Record,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch.serialization", "_get_layout"): _Record,
    ("torch", "Size"): _Size,
    **{("torch", name): name for name in _ITEM_BYTES},  # a dtype is its name
    **{
        (module, name): _Record
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath")
    },
}


# The one in Python: the one in C allocates what a number in the file tells it to.
class _Unpickler(pickle._Unpickler):  # type: ignore[name-defined, misc]
    # Nor these bytes, for which it does the same before it reads them; no checkpoint has any.
    dispatch = {
        code: read for code, read in pickle._Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]
    }  # type: ignore[attr-defined]

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _STANDS_FOR[module, name]
        except KeyError:
            raise ValueError(f"it names {module}.{name}, which no checkpoint needs") from None


def read(folder: Path, *, sizes: Mapping[str, int] | None = None) -> Stored:
    """Reads and checks `.metadata`.

    Args:
        folder: A checkpoint.
        sizes: Name -> bytes of the folder's files; None: they are asked for.

    Raises:
        Unreadable: It is missing, no such pickle, or says what cannot be.
    """
    path = folder / NAME
    content = read_bytes(path, inside=folder, limit=LIMIT)
    try:
        record = _Unpickler(io.BytesIO(content)).load()
    except Exception as error:  # a pickle that somebody made can raise anything
        raise Unreadable(f"{printable(path)}: {printable(str(error) or type(error).__name__)}") from None
    try:
        return _checked(record, _Sizes(folder) if sizes is None else sizes)
    except (ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        raise Unreadable(f"{printable(path)}: not as torch writes it ({printable(error)})") from None


class _Sizes(dict[str, int]):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, name: str) -> int:
        path = self._folder / name
        if path.is_symlink() or not path.is_file():
            raise KeyError(name)
        self[name] = path.stat().st_size
        return self[name]


def _checked(record: Any, sizes: Mapping[str, int]) -> Stored:
    fields = _state(record, _Metadata)
    places = {
        (state["fqn"], _numbers(state.get("offset"))): _place(value, sizes)
        for state, value in ((_state(key, _Index), value) for key, value in fields["storage_data"].items())
    }
    tensors, values = {}, {}
    for name, entry in fields["state_dict_metadata"].items():
        if not isinstance(name, str):
            raise ValueError(f"a name is {type(name).__name__}")
        if isinstance(entry, _Bytes):
            values[name] = places[name, None]
        else:
            tensors[name] = _tensor(name, _state(entry, _Tensor), places)
    return Stored(
        tensors, values, {name: _path(fields["planner_data"][name]) for name in (*tensors, *values)}
    )


def _state(record: Any, kind: type[_Record]) -> dict[str, Any]:
    if not isinstance(record, kind) or not isinstance(record.state, dict):
        raise ValueError(f"{type(record).__name__} in place of {kind.__name__.strip('_')}")
    return record.state


def _numbers(size: Any) -> tuple[int, ...] | None:
    if size is None:
        return None
    (numbers,) = size.arguments if isinstance(size, _Size) else (None,)
    if not isinstance(numbers, tuple | list) or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
        raise ValueError("a size that is none")
    return tuple(numbers)


def _place(record: Any, sizes: Mapping[str, int]) -> Place:
    state = _state(record, _StorageInfo)
    file, start, length = state["relative_path"], state["offset"], state["length"]
    if not isinstance(file, str) or not _DATA_FILE.fullmatch(file):
        raise ValueError(f"{file} is no file of a checkpoint")
    if state.get("transform_descriptors"):
        raise ValueError("transformed data is not read")
    try:
        available = sizes[file]
    except KeyError:
        raise ValueError(f"{file} is missing") from None
    if (
        type(start) is not int
        or type(length) is not int
        or start < 0
        or length < 0
        or start + length > available
    ):
        raise ValueError(f"{file} has {available} bytes, and more are said to be there")
    return Place(file, start, length)


def _tensor(name: str, state: dict[str, Any], places: Mapping[Any, Place]) -> StoredTensor:
    dtype, size = state["properties"].state[0], _numbers(state["size"])
    if size is None or dtype not in _ITEM_BYTES:
        raise ValueError(f"{name} has no size or dtype")
    parts = []
    for chunk in state["chunks"]:
        offsets, lengths = _numbers(chunk.state["offsets"]), _numbers(chunk.state["sizes"])
        if offsets is None or lengths is None or not len(offsets) == len(lengths) == len(size):
            raise ValueError(f"{name} has a part of another shape")
        if any(at + n > total for at, n, total in zip(offsets, lengths, size)):
            raise ValueError(f"{name} has a part outside of it")
        place = places[name, offsets]
        if math.prod(lengths) * _ITEM_BYTES[dtype] > place.length:
            raise ValueError(f"{name} is larger than what is stored of it")
        parts.append(TensorPart(offsets, lengths, place))
    if sum(math.prod(part.sizes) for part in parts) != math.prod(size):
        raise ValueError(f"{name} is not the sum of its parts")
    return StoredTensor(dtype, size, tuple(parts))


def _path(keys: Any) -> tuple[str | int, ...]:
    if not isinstance(keys, tuple) or not all(type(key) in (str, int) for key in keys):
        raise ValueError("a path that is none")
    return keys
