"""A corpus as memory-mapped token files, in a folder written atomically and verified on each start."""

import hashlib
import json
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_SPLITS = ("train", "val")
_INDEX = "corpus.json"


@dataclass(frozen=True)
class Corpus:
    """Tokens of one corpus, already split.

    Attributes:
        name: Name of the data source.
        vocab_size: Number of different tokens a model must know.
        train_tokens: uint8 [N], read-only.
        val_tokens: uint8 [M], read-only.
        checksum: sha256 (hex) over name, vocabulary and both splits; results compare only when equal.
        folder: Where the token files lie and derived values may be cached; None for a corpus in memory.
    """

    name: str
    vocab_size: int
    train_tokens: np.ndarray
    val_tokens: np.ndarray
    checksum: str
    folder: Path | None = None


@dataclass(frozen=True, kw_only=True)
class DataSource(ABC):
    """Base of every `data` option: the keys all of them share.

    Attributes:
        seq_length: Tokens a model reads per sequence.
        global_batch_size: Sequences of one optimizer step over all ranks.
        micro_batch_size: Sequences per rank and micro-batch, or "auto"; accumulation follows from it.
        shuffle: True: a new order of the training sequences every epoch; False: the order of the corpus.
    """

    seq_length: int
    global_batch_size: int
    micro_batch_size: int | str
    shuffle: bool

    @abstractmethod
    def load(self) -> Corpus:
        """Opens the corpus, building its cache when there is none. Every rank may call it, at any time."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Turns a prompt into tokens."""

    @abstractmethod
    def decode(self, tokens: list[int]) -> str:
        """Turns generated tokens into text."""


def write_atomic(path: Path, content: bytes) -> None:
    """Replaces `path` in one step: a reader sees the old file or the whole new one, also after a crash."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes private files, but a cache may be shared by several users.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def write_corpus(folder: Path, *, name: str, vocab_size: int, train: bytes, val: bytes) -> None:
    """Writes both splits, then the index that makes them valid.

    Every file is replaced on its own, the index last. Replacing files instead of the folder means that
    processes that build one corpus at once, or repair it, never show a reader a missing folder.

    Raises:
        OSError: The folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _sync_folder(folder.parent)
    index: dict[str, object] = {"name": name, "vocab_size": vocab_size}
    for split, content in zip(_SPLITS, (train, val)):
        write_atomic(folder / f"{split}.bin", content)
        index[split] = {"tokens": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    write_atomic(folder / _INDEX, json.dumps(index, indent=2).encode())


def read_corpus(folder: Path) -> Corpus | None:
    """Opens a corpus folder; None when it is missing, incomplete, truncated or altered.

    Reads every byte once to verify it: some tens of milliseconds for a corpus of tens of megabytes.
    """
    tokens = {}
    try:
        index = json.loads((folder / _INDEX).read_bytes())
        for split in _SPLITS:
            path = folder / f"{split}.bin"
            # An empty file cannot be mapped, yet a small corpus may have an empty split.
            mapped = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
            if mapped.size != index[split]["tokens"]:
                return None
            if hashlib.sha256(mapped.data).hexdigest() != index[split]["sha256"]:
                return None
            tokens[split] = mapped
        return Corpus(
            name=index["name"],
            vocab_size=index["vocab_size"],
            train_tokens=tokens["train"],
            val_tokens=tokens["val"],
            checksum=hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest(),
            folder=folder,
        )
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None


def open_or_build(
    folder: Path, build: Callable[[], tuple[bytes, bytes]], *, name: str, vocab_size: int
) -> Corpus:
    """Opens the corpus in `folder`, or calls `build` for its (train, val) tokens and writes it there first.

    Raises:
        OSError: The folder cannot be read or written.
    """
    corpus = read_corpus(folder)
    if corpus is None:
        train, val = build()
        write_corpus(folder, name=name, vocab_size=vocab_size, train=train, val=val)
        corpus = read_corpus(folder)
        if corpus is None:
            raise OSError(f"{folder} does not hold what was just written to it")
    return corpus


def _sync_folder(folder: Path) -> None:
    """Makes a rename in `folder` durable; systems that cannot open folders (Windows) have no such call."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
