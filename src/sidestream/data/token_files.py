"""Files of tokens that exist already."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np

from sidestream.config.data_content import check_tokens
from sidestream.config.data_files import TOKEN_DTYPES, TokenFormat, token_format
from sidestream.config.errors import ConfigError
from sidestream.data.corpus import Corpus, DataSource
from sidestream.data.record import record_of_tokens, shared_blocks
from sidestream.data.store import block_starts, file_digest, map_tokens
from sidestream.data.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer, identity_of
from sidestream.tracking.data_record import DataRecord

_CHUNK = 2**20
_COMPARED = 256  # chunks


@dataclass(frozen=True, kw_only=True)
class TokenFiles(DataSource):
    """`data=tokens`: `.npy` files of one axis, or raw files of little-endian integers. Mapped, never copied.

    `<train_file>.json` beside it may hold `dtype`, `vocab_size` and `eos_token`. Files above 256 MiB are not
    read at the start: checksum and range of the tokens come from samples then. A window that holds a token out
    of range stops the run.

    Attributes:
        cache_dir: Folder for what is derived from the files.
        train_file: Training tokens.
        val_file: Validation tokens, the same dtype; None takes them from the end of `train_file`.
        val_fraction: Share of `train_file` for validation, without a `val_file`.
        dtype: Type of the integers in raw files: uint8, uint16, uint32, int32 or int64; None where the
            header or the JSON says.
        vocab_size: Number of different tokens; "auto" where the JSON says, or 256 with `dtype` uint8.
        eos_token: The last token of every document; None: unknown.
        tokenizer: What `eval.py` reads and writes: "bytes", a `tokenizer.json`, or None for plain numbers.
    """

    cache_dir: str
    train_file: str
    val_file: str | None
    val_fraction: float
    dtype: str | None
    vocab_size: int | str
    eos_token: int | None
    tokenizer: str | None

    example_prompt: ClassVar[str] = ""

    def load(self) -> Corpus:
        """Maps the files.

        Raises:
            ConfigError: A file cannot be read, is no array of integers, or holds tokens out of range.
        """
        known = self._format
        train = self._open("data.train_file", self.train_file, known)
        if self.val_file is None:
            cut = self._cut(train, known.eos_token)
            train, val = train[:cut], train[cut:]
        else:
            val = self._open("data.val_file", self.val_file, known)
            if _same(train, val):
                raise ConfigError(
                    "data.val_file",
                    self.val_file,
                    f"a copy of {self.train_file}, which is trained on",
                    expected="other tokens",
                    fix="data.val_file=null",
                )
        shared = shared_blocks(train, val) if self.val_file is not None else None
        checksum = self._checksum(known)
        folder = (
            Path(self.cache_dir).expanduser() / "tokens" / hashlib.sha256(checksum.encode()).hexdigest()[:16]
        )
        return Corpus(
            name="tokens",
            vocab_size=known.vocab_size,
            train_tokens=train,
            val_tokens=val,
            checksum=checksum,
            folder=folder,
            eos_token=known.eos_token,
            unit="byte" if self.tokenizer == "bytes" else "token",
            tokenizer=self.tokenizer
            if self.tokenizer in (None, "bytes")
            else identity_of(Path(self.tokenizer).expanduser()),
            record=DataRecord(
                tokens={"train": train.size, "val": val.size},
                notes=[shared] if shared else [],
                **record_of_tokens(train, val, known.eos_token),
            ),
        )

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, or of numbers with spaces between them where there is no tokenizer.

        Raises:
            ConfigError: Without a tokenizer, `text` is not numbers of tokens.
        """
        if self._tokenizer is not None:
            return self._tokenizer.encode(text)
        numbers = text.split()
        if any(not n.isdecimal() or int(n) >= self._format.vocab_size for n in numbers):
            raise ConfigError(
                "prompt",
                text,
                "data.tokenizer=null has no words",
                expected=f"numbers from 0 to {self._format.vocab_size - 1} with spaces between them",
                fix='prompt="1 2 3"',
            )
        return [int(number) for number in numbers]

    def decode(self, tokens: list[int]) -> str:
        if self._tokenizer is not None:
            return self._tokenizer.decode(tokens)
        return "".join(f" {token}" for token in tokens)

    @cached_property
    def _format(self) -> TokenFormat:
        return token_format(
            self.train_file, dtype=self.dtype, vocab_size=self.vocab_size, eos_token=self.eos_token
        )

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        if self.tokenizer is None:
            return None
        return (
            ByteTokenizer() if self.tokenizer == "bytes" else BPETokenizer(Path(self.tokenizer).expanduser())
        )

    def _open(self, key: str, file: str, known: TokenFormat) -> np.ndarray:
        path = Path(file).expanduser()
        check_tokens(key, path, known.dtype)

        def refuse(why: str) -> ConfigError:
            expected = f"one axis of {', '.join(TOKEN_DTYPES)}"
            return ConfigError(key, file, why, expected=expected, fix=f"{key}=<such a file>")

        try:
            if path.suffix == ".npy":
                tokens = np.load(path, mmap_mode="r", allow_pickle=False)
            else:
                dtype = np.dtype(known.dtype).newbyteorder("<")
                if path.stat().st_size % dtype.itemsize:
                    raise refuse(
                        f"its size is no multiple of {dtype.itemsize} bytes (data.dtype={known.dtype})"
                    )
                tokens = map_tokens(path, dtype)
        except (OSError, EOFError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise refuse(f"cannot be read ({error})") from error
        if tokens.ndim != 1 or tokens.dtype.name not in TOKEN_DTYPES:
            raise refuse(f"an array of {tokens.ndim} axes of {tokens.dtype.name}")
        if known.dtype not in (None, tokens.dtype.name):
            raise refuse(f"its header says {tokens.dtype.name}, data.dtype={known.dtype}")
        self._check_range(tokens, known.vocab_size)
        return tokens

    def _check_range(self, tokens: np.ndarray, vocab_size: int) -> None:
        for part in _samples(tokens):
            if part.size and not 0 <= int(part.min()) <= int(part.max()) < vocab_size:
                raise ConfigError(
                    "data.vocab_size",
                    vocab_size,
                    f"the files hold the tokens {int(part.min())} and {int(part.max())}",
                    expected=f"more than {int(part.max())}, and data.dtype as the files were written",
                    fix=f"data.vocab_size={int(part.max()) + 1}, or data.dtype",
                )

    def _cut(self, tokens: np.ndarray, eos_token: int | None) -> int:
        """Where validation begins: after the first end of a document from `1 - val_fraction` on."""
        cut = tokens.size - round(tokens.size * self.val_fraction)
        if eos_token is not None:
            for begin in range(max(cut - 1, 0), tokens.size, _CHUNK):
                ends = np.flatnonzero(tokens[begin : begin + _CHUNK] == eos_token)
                if ends.size and begin + ends[0] + 1 < tokens.size:
                    return begin + int(ends[0]) + 1
        return cut

    def _checksum(self, known: TokenFormat) -> str:
        files = [Path(file).expanduser() for file in (self.train_file, self.val_file) if file is not None]
        digests = [file_digest(file) for file in files]
        cut = None if self.val_file else [self.val_fraction, known.eos_token]
        facts = [digests, known.dtype, known.vocab_size, cut]
        joined = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        return f"sampled:{joined}" if any(digest.startswith("sampled:") for digest in digests) else joined


def _same(train: np.ndarray, val: np.ndarray) -> bool:
    """Whether two files hold the same tokens, whatever their containers; of big ones samples are compared."""
    if train.size != val.size:
        return False
    chunks = -(-train.size // _CHUNK)
    places = [train.size * chunk // chunks for chunk in range(0, chunks, max(chunks // _COMPARED, 1))]
    return all(np.array_equal(train[begin : begin + _CHUNK], val[begin : begin + _CHUNK]) for begin in places)


def _samples(tokens: np.ndarray) -> Iterator[np.ndarray]:
    """All tokens of a small file, samples of a big one."""
    if tokens.nbytes <= 16 * 2**20:
        yield tokens
        return
    for place in block_starts(tokens.nbytes):
        first = place // tokens.itemsize
        yield tokens[first : first + 2**14]
