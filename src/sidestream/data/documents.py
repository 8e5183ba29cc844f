"""Sources made of text documents: split, tokenised once, cached. Base of `data=text` and `data=huggingface`."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from sidestream.config.data_content import check_replaced, western
from sidestream.config.errors import ConfigError
from sidestream.data.corpus import Corpus, DataSource
from sidestream.data.record import Intake, content_hash
from sidestream.data.store import SPLITS, Content, open_or_build
from sidestream.data.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer
from sidestream.tracking.data_record import DataRecord

DEFAULT_VOCAB_SIZE = 4096  # of a trained tokenizer
_FORMAT = 1  # a new number makes every cached corpus be built again
_BATCH_BYTES = 4 * 2**20
_TOKENIZER = "tokenizer.json"


class Document(NamedTuple):
    """Attributes: content: UTF-8; validation: which split it belongs to, None lets a hash of the content decide."""

    content: bytes
    validation: bool | None = None


@dataclass(frozen=True, kw_only=True)
class DocumentSource(DataSource):
    """Documents become tokens with an end token after each, in the order in which they come.

    A hash of its content decides whether a document is for validation: the same on every machine, and copies
    of a document never lie in both splits. A corpus of one document is cut instead, the end is for validation.

    Attributes:
        cache_dir: Folder for token files, shared by all runs; `~` is the home folder.
        val_fraction: Share of the documents kept for validation, where the source does not say which.
        tokenizer: "bytes", or "bpe": trained on the training split.
        vocab_size: Number of tokens of bpe, at most; "auto" means 4096.
    """

    cache_dir: str
    val_fraction: float = 0.05
    tokenizer: str = "bytes"
    vocab_size: int | str = "auto"

    name: ClassVar[str]

    @abstractmethod
    def documents(self) -> Iterator[Document]:
        """All documents, the same ones in the same order each time.

        Raises:
            ConfigError: They cannot be read.
        """

    @abstractmethod
    def identity(self) -> object:
        """JSON value that changes whenever `documents` would; computed without reading them."""

    def load(self) -> Corpus:
        """Opens the cached corpus or builds it: one pass over the documents, two for bpe.

        Raises:
            ConfigError: The documents cannot be read, one of the splits is empty, the cache cannot be written,
                or a package is missing.
        """
        corpus = open_or_build(self._folder, self._content, name=self.name)
        own = self._tokenizer
        return replace(corpus, eos_token=own.eos_token, unit=own.unit, tokenizer=own.identity)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens)

    @cached_property
    def intake(self) -> Intake:
        """What the present pass over `documents` has met; `documents` may add what it left out."""
        return Intake()

    @cached_property
    def _folder(self) -> Path:
        settings = [_FORMAT, self.val_fraction, self.tokenizer, self.vocab_size, self.identity()]
        key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
        return Path(self.cache_dir).expanduser() / self.name / key

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return ByteTokenizer() if self.tokenizer == "bytes" else BPETokenizer(self._folder / _TOKENIZER)

    def _content(self) -> Content:
        if self.tokenizer == "bytes":
            record = partial(self._record, zeros_end_documents=True)
            return Content(ByteTokenizer.vocab_size, self._parts(ByteTokenizer()), record=record)
        path = self._folder / _TOKENIZER
        size = DEFAULT_VOCAB_SIZE if self.vocab_size == "auto" else int(self.vocab_size)
        train = (document for split, document in self._split() if split == "train")
        BPETokenizer.train(train, vocab_size=size, path=path)
        tokenizer = BPETokenizer(path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        record = partial(self._record, zeros_end_documents=False)
        return Content(tokenizer.vocab_size, self._parts(tokenizer), {_TOKENIZER: digest}, record)

    def _record(self, *, zeros_end_documents: bool) -> DataRecord:
        return self.intake.record(zeros_end_documents=zeros_end_documents)

    def _parts(self, tokenizer: Tokenizer) -> Iterator[tuple[str, np.ndarray]]:
        """Encodes in batches: a tokenizer works on several documents at once."""
        splits: list[str] = []
        documents: list[bytes] = []
        size = 0
        for split, document in self._split():
            splits.append(split)
            documents.append(document)
            size += len(document)
            if size >= _BATCH_BYTES:
                yield from zip(splits, tokenizer.encode_documents(documents))
                splits, documents, size = [], [], 0
        yield from zip(splits, tokenizer.encode_documents(documents))

    def _split(self) -> Iterator[tuple[str, bytes]]:
        """Pairs of split and content, empty documents left out.

        Raises:
            ConfigError: A split has no document, or the text is of another encoding.
        """
        self.__dict__.pop("intake", None)  # a new pass
        intake = self.intake
        for content, validation in self._with_one_cut():
            digest = content_hash(content)
            if validation is None:
                validation = digest / 2**64 < self.val_fraction
            split = SPLITS[validation]
            intake.take(split, content, digest)
            yield split, content
        if self.tokenizer != "bytes":
            encoding = getattr(self, "encoding", "utf-8")
            where, likely = f"data={self.name}", western(intake.broken)
            check_replaced(where, intake.replaced, intake.characters, encoding=encoding, likely=likely)
        for split in SPLITS:
            if not intake.hashes[split]:
                raise ConfigError(
                    "data.val_fraction",
                    self.val_fraction,
                    f"no document of data={self.name} is in the {split} split",
                    expected="documents in both splits",
                    fix="data.val_fraction=<another share>, or name the validation data",
                )

    def _with_one_cut(self) -> Iterator[Document]:
        documents = self._not_empty()
        first, second = next(documents, None), next(documents, None)
        if first is None:
            return
        if second is None and first.validation is None:
            place = _line_start(first.content, round(len(first.content) * (1 - self.val_fraction)))
            yield Document(first.content[:place], False)
            yield Document(first.content[place:], True)
            return
        yield first
        if second is not None:
            yield second
        yield from documents

    def _not_empty(self) -> Iterator[Document]:
        for document in self.documents():
            if document.content:
                yield document
            else:
                self.intake.dropped["empty"] += 1


def _line_start(content: bytes, place: int) -> int:
    """The last start of a line at or before `place`; in a text of one line, of a character."""
    start = content.rfind(b"\n", 0, place) + 1
    if start:
        return start
    while place > 0 and content[place : place + 1] and (content[place] & 0xC0) == 0x80:
        place -= 1
    return place
