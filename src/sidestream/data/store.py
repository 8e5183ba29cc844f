"""Token files in a folder, written atomically, memory-mapped, verified on each start."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from sidestream.config.errors import ConfigError
from sidestream.data.corpus import Corpus
from sidestream.tracking.data_record import SPLITS, DataRecord
from sidestream.tracking.folder import sync_folder
from sidestream.tracking.untrusted import read_json

WHOLE_BYTES = 256 * 2**20  # files up to this size are read whole to verify them
_BLOCK, _BLOCKS = 64 * 1024, 256
_INDEX = "corpus.json"
_RECORD = "record.json"  # beside the index: a checksum is of the tokens, not of what is said about them


@dataclass(frozen=True)
class Content:
    """What goes into a corpus folder.

    Attributes:
        vocab_size: Decides the dtype of the files: `token_dtype`.
        parts: Pairs of a split and the tokens that follow there: bytes, or integers that fit the dtype.
        files: Other files of the folder, written before `parts` is consumed, name -> sha256 (hex).
        record: Called once `parts` is consumed: what became of the source.
    """

    vocab_size: int
    parts: Iterable[tuple[str, bytes | np.ndarray]]
    files: Mapping[str, str] = field(default_factory=dict)
    record: Callable[[], DataRecord] = DataRecord


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint8, uint16 and uint32 that holds every token."""
    return np.min_scalar_type(max(vocab_size, 1) - 1)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that becomes `path` in one step at the end; an error leaves the old file and nothing else."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes private files, but a cache may be shared by several users.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_atomic(path: Path, content: bytes) -> None:
    """Replaces `path` in one step: a reader sees the old file or the whole new one, also after a crash."""
    with replacing(path) as file:
        file.write(content)


def write_corpus(folder: Path, content: Content, *, name: str) -> None:
    """Writes both splits, then the index that makes them valid.

    Every file is replaced on its own, the index last. Replacing files instead of the folder means that
    processes that build one corpus at once, or repair it, never show a reader a missing folder.

    Raises:
        OSError: The folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sync_folder(folder.parent)
    dtype = token_dtype(content.vocab_size)
    index: dict[str, object] = {"name": name, "vocab_size": content.vocab_size}
    if dtype != np.uint8:
        index["dtype"] = dtype.name
    if content.files:
        index["files"] = dict(content.files)
    digests = {split: hashlib.sha256() for split in SPLITS}
    counts = dict.fromkeys(SPLITS, 0)
    with ExitStack() as stack:
        files = {split: stack.enter_context(replacing(folder / f"{split}.bin")) for split in reversed(SPLITS)}
        for split, tokens in content.parts:
            data = tokens if isinstance(tokens, bytes) else np.ascontiguousarray(tokens, dtype).tobytes()
            files[split].write(data)
            digests[split].update(data)
            counts[split] += len(data) // dtype.itemsize
    for split in SPLITS:
        index[split] = {"tokens": counts[split], "sha256": digests[split].hexdigest()}
        if (folder / f"{split}.bin").stat().st_size > WHOLE_BYTES:
            index[split]["sampled"] = file_digest(folder / f"{split}.bin")  # type: ignore[index]
    record = replace(content.record(), tokens=dict(counts))
    write_atomic(folder / _RECORD, json.dumps(record.as_dict(), indent=2).encode())
    write_atomic(folder / _INDEX, json.dumps(index, indent=2).encode())


def read_corpus(folder: Path) -> Corpus | None:
    """Opens a corpus folder; None when it is missing, incomplete, truncated or altered.

    Reads every byte once to verify it (some tens of milliseconds for a corpus of tens of megabytes), but only
    size and samples of a file above `WHOLE_BYTES`.
    """
    tokens = {}
    try:
        index = read_json(folder / _INDEX)
        dtype = np.dtype(index.get("dtype", "uint8"))
        if dtype.kind != "u":  # a cache may be shared; numbers mapped as objects would be pointers
            return None
        for name, digest in index.get("files", {}).items():
            if hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
                return None
        for split in SPLITS:
            path, expected = folder / f"{split}.bin", index[split]
            if path.stat().st_size != expected["tokens"] * dtype.itemsize:
                return None
            if file_digest(path) != expected.get("sampled", expected["sha256"]):
                return None
            tokens[split] = map_tokens(path, dtype)
        return Corpus(
            name=index["name"],
            vocab_size=index["vocab_size"],
            train_tokens=tokens["train"],
            val_tokens=tokens["val"],
            checksum=hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest(),
            folder=folder,
            record=DataRecord.of(read_json(folder / _RECORD)),
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        return None


def open_or_build(folder: Path, build: Callable[[], Content], *, name: str) -> Corpus:
    """Opens the corpus in `folder`, or calls `build` for its content and writes it there first.

    Raises:
        ConfigError: The folder cannot be read or written.
    """
    try:
        corpus = read_corpus(folder)
        if corpus is not None:
            return corpus
        folder.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(folder):
            corpus = read_corpus(folder)  # another rank may have built it meanwhile
            if corpus is None:
                write_corpus(folder, build(), name=name)
                corpus = read_corpus(folder)
        if corpus is None:
            raise OSError(f"{folder} does not hold what was just written to it")
    except OSError as error:
        raise ConfigError(
            "data.cache_dir",
            str(folder.parent.parent),
            f"the corpus cannot be cached there ({error})",
            expected="a folder that can be written",
            fix="data.cache_dir=<such a folder>",
        ) from error
    return corpus


def file_digest(path: Path) -> str:
    """Digest of a file: sha256 (hex) up to `WHOLE_BYTES`, else `sampled:` and the sha256 of its size and blocks.

    The blocks are 256 of 64 KiB, spread evenly, the first and the last included. They tell another file, a
    truncated one and one that was written anew; a few changed bytes between them go unnoticed.
    """
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if size <= WHOLE_BYTES:
            while block := file.read(2**20):
                digest.update(block)
            return digest.hexdigest()
        digest.update(f"{size}\n".encode())
        for place in block_starts(size):
            file.seek(place)
            digest.update(file.read(_BLOCK))
    return f"sampled:{digest.hexdigest()}"


def block_starts(size: int) -> list[int]:
    """First bytes of the sampled blocks of a file of `size` bytes."""
    return [(size - _BLOCK) * block // (_BLOCKS - 1) for block in range(_BLOCKS)]


def map_tokens(path: Path, dtype: np.dtype) -> np.ndarray:
    """Maps a file without reading it."""
    # An empty file cannot be mapped, yet a small corpus may have an empty split.
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Lets one process of several in, where the system has file locks.

    It saves work only: whoever builds the same thing at once writes the same files.
    """
    with ExitStack() as stack:
        with suppress(ImportError, OSError):
            import fcntl

            lock = stack.enter_context(open(folder / ".lock", "a"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
