"""Counts what a source reads: documents, what is dropped and why, what is in both splits."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sidestream.config.data_content import PEEK
from sidestream.tracking.data_record import SPLITS, DataRecord

LOOKED_UP = 2**24  # tokens; more would be seconds, at every start


@dataclass
class Intake:
    """Counts one pass over documents. `DocumentSource.documents` may add to `dropped`, `separators` and `notes`."""

    dropped: Counter[str] = field(default_factory=Counter)
    separators: int | None = None
    notes: list[str] = field(default_factory=list)
    replaced: int = 0
    broken: bytes = b""  # around the first byte that is no UTF-8
    characters: int = 0
    zeros: int = 0
    hashes: dict[str, array] = field(default_factory=lambda: {split: array("Q") for split in SPLITS})

    def take(self, split: str, content: bytes, digest: int) -> None:
        """Counts a document of a split; `digest` as `content_hash` returns it."""
        self.hashes[split].append(digest)
        self.zeros += content.count(0)
        try:
            self.characters += len(content.decode())
        except UnicodeDecodeError as error:
            self.broken = self.broken or content[max(error.start - PEEK, 0) : error.start + PEEK]
            text = content.decode(errors="replace")
            self.characters += len(text)
            self.replaced += text.count("\ufffd") - content.count("\ufffd".encode())

    def record(self, *, zeros_end_documents: bool) -> DataRecord:
        """The account without its tokens."""
        train, val = (np.frombuffer(self.hashes[split], np.uint64) for split in SPLITS)
        return DataRecord(
            documents={"train": train.size, "val": val.size},
            dropped=dict(self.dropped),
            replaced_characters=self.replaced,
            zero_bytes=self.zeros if zeros_end_documents else 0,
            separators=self.separators,
            shared_documents=int(np.isin(val, train).sum()),
            notes=self.notes,
        )


def content_hash(content: bytes) -> int:
    """A number below 2**64 that depends on the content only."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big")


_BLOCK = 32  # tokens; so many in a row are the same by copying


def shared_blocks(train: np.ndarray, val: np.ndarray) -> str | None:
    """A note where blocks of the validation tokens lie anywhere in those for training: a copy, or a part of one.

    Blocks of one token repeated are no sign. Nothing is looked up in more than `LOOKED_UP` tokens.

    Args:
        train: Integers [N].
        val: Integers [M].
    """
    if not _BLOCK <= val.size <= LOOKED_UP or not _BLOCK <= train.size <= LOOKED_UP - val.size:
        return None
    blocks = val[: val.size // _BLOCK * _BLOCK].reshape(-1, _BLOCK)
    varied = (blocks != blocks[:, :1]).any(axis=1)
    found = np.isin(_windows(val)[::_BLOCK][: len(blocks)][varied], _windows(train))
    if not found.any():
        return None
    share = found.mean()
    return (
        f"{int(found.sum()):,} of {found.size:,} blocks of {_BLOCK} validation tokens ({share:.1%}) "
        "are in the training tokens too"
    )


def _windows(tokens: np.ndarray) -> np.ndarray:
    """A number for each `_BLOCK` tokens in a row [N - 31], equal for equal ones: a polynomial, by doubling."""
    sums, base, width = tokens.astype(np.uint64) + np.uint64(1), 0x9E3779B97F4A7C15, 1
    while width < _BLOCK:
        sums = sums[:-width] * np.uint64(base) + sums[width:]
        base, width = base * base % 2**64, 2 * width
    return sums


def record_of_tokens(train: np.ndarray, val: np.ndarray, eos_token: int | None) -> dict[str, Any]:
    """Documents of two splits of tokens, and how many of validation are in training too; for `DataRecord`.

    Args:
        train: Integers [N].
        val: Integers [M].
        eos_token: Ends every document; None: unknown.
    """
    if eos_token is None or train.size + val.size > LOOKED_UP:
        return {}
    hashes = {}
    for split, tokens in zip(SPLITS, (train, val)):
        ends = [*(np.flatnonzero(tokens == eos_token) + 1).tolist(), tokens.size]
        pieces = (tokens[begin:end] for begin, end in zip([0, *ends], ends) if end > begin)
        hashes[split] = np.array([content_hash(piece.tobytes()) for piece in pieces], np.uint64)
    return {
        "documents": {split: found.size for split, found in hashes.items()},
        "shared_documents": int(np.isin(hashes["val"], hashes["train"]).sum()),
    }
