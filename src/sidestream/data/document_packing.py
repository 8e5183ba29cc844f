"""Documents in rows of fixed length, each with positions and attention of its own.

A document of n tokens has n - 1 predictions: its tokens but the last are inputs, its tokens but the first targets.
Nothing is predicted across a border. With L = 8 (`.` is padding; letters are documents, numbers their tokens):

    inputs    a0 a1 a2 b0 b1 b2 b3 .
    targets   a1 a2 a3 b1 b2 b3 b4 .
    segments  0  0  0  1  1  1  1  -1
    position  0  1  2  0  1  2  3  .

A longer document is cut into pieces of L inputs and a rest; a piece begins a new segment, and its last target is the
first input of the next piece.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from sidestream.config.errors import ConfigError
from sidestream.data.batch import IGNORE, Batch
from sidestream.data.corpus import Corpus
from sidestream.data.store import map_tokens, one_at_a_time, write_atomic

OPEN_ROWS = 64  # rows that still take pieces; more fill rows better and mix documents of more distant places
_FORMAT = 1  # a new number makes every cached plan be made again
_CHUNK = 2**24
_DIGEST = 32


class PackedDataset(Dataset[Batch]):
    """Rows of packed documents. Item: a `Batch` of one row, padded with token 0.

    Args:
        tokens: Integers [N], every document ends with `Corpus.eos_token`.
        pieces: int64 [P, 3] from `plan_rows`; may be memory-mapped.
        seq_length: L, in tokens.
    """

    def __init__(self, tokens: np.ndarray, pieces: np.ndarray, seq_length: int) -> None:
        self.tokens, self.pieces, self.seq_length = tokens, pieces, seq_length
        self._rows = pieces[:, 0]

    def __len__(self) -> int:
        return int(self._rows[-1]) + 1 if len(self._rows) else 0

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(index)
        inputs = np.zeros(self.seq_length, np.int64)
        targets = np.full(self.seq_length, IGNORE, np.int64)
        segments = np.full(self.seq_length, -1, np.int32)
        first, last = np.searchsorted(self._rows, [index, index + 1])
        place = 0
        for segment, (_, start, length) in enumerate(self.pieces[first:last].tolist()):
            document = self.tokens[start : start + length + 1]
            inputs[place : place + length] = document[:-1]
            targets[place : place + length] = document[1:]
            segments[place : place + length] = segment
            place += length
        row = (torch.from_numpy(values).unsqueeze(0) for values in (inputs, targets, segments))
        return Batch(*row)

    @property
    def fill(self) -> float:
        """Share of the places in all rows that predict something."""
        return float(self.pieces[:, 2].sum()) / max(len(self) * self.seq_length, 1)


def packed_dataset(corpus: Corpus, split: str, seq_length: int) -> PackedDataset:
    """Packs a split ("train" or "val"). The plan is made once and kept in `corpus.folder`, 24 bytes a piece.

    Raises:
        ConfigError: The corpus does not say where documents end, or the split has no document of two tokens.
    """
    if corpus.eos_token is None:
        raise ConfigError(
            "data.packing",
            "documents",
            f"data={corpus.name} does not say where documents end",
            expected="concat, or a source with an eos_token",
            fix="data.packing=concat",
        )
    tokens = corpus.train_tokens if split == "train" else corpus.val_tokens
    pieces = _cached_plan(corpus, tokens, split, seq_length)
    if not len(pieces):
        why = f"the {split} split has no document of two tokens"
        raise ConfigError("data.packing", "documents", why, expected="documents", fix="data.packing=concat")
    return PackedDataset(tokens, pieces, seq_length)


def document_ends(tokens: np.ndarray, eos_token: int) -> np.ndarray:
    """First index after each document, in order: int64 [D]. What follows the last `eos_token` is a document too."""
    ends = [np.empty(0, np.int64)]
    for begin in range(0, tokens.size, _CHUNK):  # a comparison of a whole corpus would not fit in memory
        ends.append(np.flatnonzero(tokens[begin : begin + _CHUNK] == eos_token) + (begin + 1))
    if tokens.size and tokens[-1] != eos_token:
        ends.append(np.array([tokens.size]))
    return np.concatenate(ends)


def plan_rows(ends: np.ndarray, seq_length: int, open_rows: int = OPEN_ROWS) -> np.ndarray:
    """Chooses a row for every piece of every document: first fit among `open_rows` rows.

    Where a piece fits in no open row, the fullest one is closed and a new row opened. Depends on nothing but the
    arguments. About 5 s for a million pieces.

    Args:
        ends: int64 [D], `document_ends`.
        seq_length: L, predictions per row.
        open_rows: Rows that are filled at the same time.

    Returns:
        int64 [P, 3]: row, index of the first input, number of predictions (1 to L); rows in order, and within a
        row the pieces in the order of the corpus.
    """
    begins = np.concatenate([[0], ends[:-1]]).astype(np.int64)[: len(ends)]
    predictions = ends - begins - 1
    counts = -(-predictions // seq_length)
    document = np.repeat(np.arange(len(ends)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = number * seq_length
    lengths = np.minimum(predictions[document] - offsets, seq_length)
    rows = _first_fit(lengths, seq_length, open_rows)
    pieces = np.stack([rows, begins[document] + offsets, lengths], axis=1)
    return pieces[np.argsort(rows, kind="stable")]


def _first_fit(lengths: np.ndarray, seq_length: int, open_rows: int) -> np.ndarray:
    rows = np.empty(len(lengths), np.int64)
    space = np.zeros(open_rows, np.int64)
    open_row = np.zeros(open_rows, np.int64)
    next_row = 0
    for piece, length in enumerate(lengths.tolist()):
        if length == seq_length:  # a row of its own, without closing one that has space
            rows[piece] = next_row
            next_row += 1
            continue
        slot = int((space >= length).argmax())
        if space[slot] < length:
            slot = int(space.argmin())
            space[slot], open_row[slot] = seq_length, next_row
            next_row += 1
        space[slot] -= length
        rows[piece] = open_row[slot]
    return rows


def _cached_plan(corpus: Corpus, tokens: np.ndarray, split: str, seq_length: int) -> np.ndarray:
    assert corpus.eos_token is not None

    def plan() -> np.ndarray:
        return plan_rows(document_ends(tokens, corpus.eos_token), seq_length)  # type: ignore[arg-type]

    if corpus.folder is None:
        return plan()
    path = corpus.folder / f"packing-{split}-{seq_length}.bin"
    identity = f"{_FORMAT} {OPEN_ROWS} {corpus.checksum} {corpus.eos_token} {split} {seq_length}\n".encode()
    found = _read_plan(path, identity)
    if found is not None:
        return found
    with suppress(OSError):  # a shared cache may be read-only for this user
        corpus.folder.mkdir(parents=True, exist_ok=True)
        with one_at_a_time(corpus.folder):
            if _read_plan(path, identity) is None:
                data = plan().tobytes()
                write_atomic(path, hashlib.sha256(identity + data).digest() + data)
    found = _read_plan(path, identity)
    return plan() if found is None else found


def _read_plan(path: Path, identity: bytes) -> np.ndarray | None:
    """A plan that was made for exactly this and is whole, memory-mapped; else None."""
    try:
        raw = map_tokens(path, np.dtype(np.uint8))
    except (OSError, ValueError):
        return None
    digest, data = raw[:_DIGEST], raw[_DIGEST:]
    expected = hashlib.sha256(identity)
    expected.update(data.data)
    if expected.digest() != digest.tobytes() or data.size % 24:
        return None
    return data.view(np.int64).reshape(-1, 3)
