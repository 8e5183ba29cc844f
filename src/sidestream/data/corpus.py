"""What a data source is, and what it gives: a corpus of tokens."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from sidestream.tracking.data_record import DataRecord


@dataclass(frozen=True)
class Corpus:
    """Tokens of one corpus, already split.

    Attributes:
        name: Name of the data source.
        vocab_size: Number of different tokens a model must know.
        train_tokens: Unsigned or signed integers [N], read-only; uint8, uint16 or uint32 in our own files.
        val_tokens: The same [M].
        checksum: Hex digest over vocabulary and both splits; results compare only when equal. It begins with
            `sampled:` where files were too big to be read whole (`store.file_digest`).
        folder: Where derived values may be cached; None for a corpus in memory.
        eos_token: The last token of every document; None if the corpus does not say where documents end.
        unit: What one token is, for people who read losses.
        tokenizer: Whose tokens these are: "bytes", or "sha256:" and the digest of a tokenizer.json; None: unknown.
        record: What became of the source; a user's own may leave it out.
    """

    name: str
    vocab_size: int
    train_tokens: np.ndarray
    val_tokens: np.ndarray
    checksum: str
    folder: Path | None = None
    eos_token: int | None = None
    unit: str = "token"
    tokenizer: str | None = None
    record: DataRecord = field(default_factory=DataRecord)


@dataclass(frozen=True, kw_only=True)
class DataSource(ABC):
    """Base of every `data` option: the keys all of them share.

    Attributes:
        seq_length: Tokens a model reads per sequence.
        global_batch_size: Sequences of one optimizer step over all ranks.
        micro_batch_size: Sequences per rank and micro-batch, or "auto"; accumulation follows from it.
        shuffle: True: a new order of the training sequences every epoch; False: the order of the corpus.
        packing: "concat": windows over the corpus as one stream; "documents": see `packing.py`.
    """

    seq_length: int
    global_batch_size: int
    micro_batch_size: int | str
    shuffle: bool
    packing: str = "concat"

    example_prompt: ClassVar[str] = "The "  # what eval.py continues unless told otherwise

    @abstractmethod
    def load(self) -> Corpus:
        """Opens the corpus, building its cache when there is none. Every rank may call it, at any time."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Turns a prompt into tokens. Called after `load`."""

    @abstractmethod
    def decode(self, tokens: list[int]) -> str:
        """Turns generated tokens into text. Called after `load`."""
