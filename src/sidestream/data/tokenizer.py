"""Text to tokens and back: bytes, or byte-pair encoding trained on the corpus (extra package `tokenizers`)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sidestream.config.errors import ConfigError
from sidestream.data.store import write_atomic

END_OF_DOCUMENT = "<|end|>"
_LONGEST = 1024  # characters; no word of a language is longer
_LONG_RUN = re.compile(rf"\S{{{_LONGEST + 1},}}|\s{{{_LONGEST + 1},}}")


class Tokenizer(Protocol):
    """Turns documents into tokens.

    Attributes:
        vocab_size: Number of different tokens.
        eos_token: Ends every document.
        unit: What one token is.
        identity: See `Corpus.tokenizer`.
    """

    vocab_size: int
    eos_token: int
    unit: str
    identity: str

    def encode_documents(self, documents: list[bytes]) -> list[np.ndarray]:
        """Tokens of each document, `eos_token` at its end."""
        ...

    def encode(self, text: str) -> list[int]:
        """Tokens of a prompt, without an end."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """Text of tokens; what is no UTF-8 becomes a replacement character."""
        ...


class ByteTokenizer:
    """One token per byte of UTF-8. A zero byte ends a document, also one that was in the text."""

    vocab_size, eos_token, unit, identity = 256, 0, "byte", "bytes"

    def encode_documents(self, documents: list[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(document + b"\0", np.uint8) for document in documents]

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class BPETokenizer:
    """Byte-level byte-pair encoding: any text can be encoded, and decodes to itself.

    Args:
        path: A `tokenizer.json` of the package `tokenizers`. Token 0 of those made by `train` ends a document.

    Raises:
        ConfigError: The package is not installed, or the file is not one of its tokenizers.
    """

    unit = "token"

    def __init__(self, path: Path) -> None:
        package = import_package("tokenizers", key="data.tokenizer", value="bpe")
        try:
            self._tokenizer = package.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises plain Exception
            raise ConfigError(
                "data.tokenizer",
                str(path),
                f"not a tokenizer file ({error})",
                expected="a tokenizer.json of the package tokenizers",
                fix="data.tokenizer=<such a file>",
            ) from error
        # Text that happens to spell a special token is text.
        self._tokenizer.encode_special_tokens = True
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        self.eos_token: int = self._tokenizer.token_to_id(END_OF_DOCUMENT) or 0
        self.identity = identity_of(path)

    @staticmethod
    def train(documents: Iterable[bytes], *, vocab_size: int, path: Path) -> None:
        """Trains on documents and writes the file atomically. The vocabulary is smaller if they have fewer pairs.

        Raises:
            ConfigError: The package is not installed.
        """
        package = import_package("tokenizers", key="data.tokenizer", value="bpe")
        level = package.pre_tokenizers.ByteLevel
        tokenizer = package.Tokenizer(package.models.BPE())
        tokenizer.pre_tokenizer = level(add_prefix_space=False)
        tokenizer.decoder = package.decoders.ByteLevel()
        trainer = package.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_DOCUMENT],
            # All 256, so that text with bytes that never occurred can be encoded too.
            initial_alphabet=sorted(level.alphabet()),
            show_progress=False,
        )
        pieces = (piece for document in documents for piece in _pieces(_text(document)))
        tokenizer.train_from_iterator(pieces, trainer=trainer)
        write_atomic(path, tokenizer.to_str().encode())

    def encode_documents(self, documents: list[bytes]) -> list[np.ndarray]:
        encoded = self._tokenizer.encode_batch([_text(document) for document in documents])
        return [np.array([*encoding.ids, self.eos_token], np.uint32) for encoding in encoded]

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


def identity_of(path: Path) -> str:
    """What `Corpus.tokenizer` says of a tokenizer.json."""
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def _pieces(text: str) -> Iterator[str]:
    """The text, with runs without a space, or of spaces, cut where the trainer's time would grow with their square."""
    begin = 0
    for run in _LONG_RUN.finditer(text):
        for place in range(run.start() + _LONGEST, run.end(), _LONGEST):
            yield text[begin:place]
            begin = place
    yield text[begin:]


def _text(document: bytes) -> str:
    return document.decode(errors="replace")


def import_package(name: str, *, key: str, value: object) -> Any:
    """Imports an optional package.

    Raises:
        ConfigError: It is not installed; the message has the command that installs it.
    """
    try:
        return __import__(name)
    except ImportError as error:
        raise ConfigError(
            key, value, f"the package {name} is not installed", expected=name, fix=f"run pip install {name}"
        ) from error
