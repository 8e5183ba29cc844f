"""Checks of the `data` group that look at files and their beginnings. Pure: neither torch nor NumPy."""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from sidestream.config.data_content import check_encoding, check_separator, check_text, check_tokens
from sidestream.config.errors import ConfigError
from sidestream.tracking.untrusted import parse_json, read_text

TOKEN_DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
_LOOKED_AT = 1000  # files of each split whose beginning is read before ranks start
LARGEST_VOCABULARY = 2**24  # a table of embeddings with more rows fits nowhere


@dataclass(frozen=True)
class TokenFormat:
    """What is known about a file of tokens without opening it. `dtype` None: its own header says."""

    dtype: str | None
    vocab_size: int
    eos_token: int | None


def check_data(cfg: DictConfig) -> None:
    """Checks our own data options; a user's may use the same keys in another way.

    Raises:
        ConfigError: Files are missing or unreadable, or keys do not fit together.
    """
    data = cfg.data
    if not str(data.get("_target_")).startswith("sidestream.data."):
        return
    for name in ("files", "val_files", "data_files"):
        expand_files(f"data.{name}", [path for path in data.get(name) or [] if not is_remote(path)])
    if "files" in data and not data.files:
        raise _refusal("data.files", [], "names no file", "paths or globs", "data.files=[my/**/*.txt]")
    if "files" in data:
        _check_text_files(data)
    if data.get("val_split") is not None and data.val_split == data.split:
        why = "the rows that are trained on"
        raise _refusal("data.val_split", data.val_split, why, "another split", "data.val_split=null")
    if data.get("streaming") and data.max_documents is None:
        why = "data.streaming=true reads rows from a stream that may have no end"
        raise _refusal("data.max_documents", None, why, "a number of rows", "data.max_documents=100000")
    vocab_size: int | None = 256  # python_source: bytes
    if "train_file" in data:
        vocab_size = _check_token_files(data)
    elif "tokenizer" in data:
        vocab_size = _check_tokenizer(data)
    stated = cfg.model.get("vocab_size")
    if vocab_size is not None and stated is not None and stated < vocab_size:
        why = f"the data has {vocab_size} different tokens"
        raise _refusal(
            "model.vocab_size", stated, why, f"null or at least {vocab_size}", "model.vocab_size=null"
        )


def expand_files(key: str, patterns: Iterable[str]) -> list[Path]:
    """Returns the files that paths and globs name, absolute, sorted, each once whatever leads to it.

    Raises:
        ConfigError: A pattern matches nothing, or something that is no readable file.
    """
    found: dict[Path, tuple[int, int]] = {}
    for pattern in patterns:
        path = str(Path(pattern).expanduser())
        # A name may contain the characters of a glob.
        matches = [path] if os.path.exists(path) else glob.glob(path, recursive=True)
        files = [match for match in matches if not os.path.isdir(match)]
        if not files:
            why = "a folder" if matches else "no such file"
            fix = f"{key}=[{pattern.rstrip('/')}/**/*]" if matches else f"{key}=[<existing files>]"
            raise _refusal(key, pattern, why, "paths or globs of files", fix)
        for file in files:
            found[Path(os.path.abspath(file))] = _check_readable(key, file)
    once = {same: path for path, same in sorted(found.items(), reverse=True)}
    return sorted(once.values())


def without(files: Iterable[Path], others: Iterable[Path]) -> list[Path]:
    """Returns the files that are none of `others`, by whatever name, link or hard link they are called there."""
    same = {_identity(path) for path in others}
    return [path for path in files if _identity(path) not in same]


def file_states(files: Iterable[Path]) -> list[list[object]]:
    """Path, size and time of change of each file: differs whenever a file was written."""
    states = [(file, file.stat()) for file in files]
    return [[str(file), state.st_size, state.st_mtime_ns] for file, state in states]


def _identity(path: Path | str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def is_remote(path: str) -> bool:
    """Whether this names something that is not on this machine."""
    return "://" in path


def token_format(
    train_file: str, *, dtype: str | None, vocab_size: int | str, eos_token: int | None
) -> TokenFormat:
    """Joins the keys with `<train_file>.json`, `{"dtype": ..., "vocab_size": ..., "eos_token": ...}`, if there is one.

    Raises:
        ConfigError: They contradict each other, leave something open, or make no sense.
    """
    beside = Path(f"{Path(train_file).expanduser()}.json")
    stated = _read_format(beside) if beside.exists() else {}
    given = {
        "dtype": dtype,
        "vocab_size": None if vocab_size == "auto" else vocab_size,
        "eos_token": eos_token,
    }
    for name, value in given.items():
        if value is not None and stated.get(name, value) != value:
            why, fix = f"{beside} says {stated[name]}", f"data.{name}={stated[name]}"
            raise _refusal(f"data.{name}", value, why, "no contradiction", fix)
    merged: dict[str, Any] = {name: stated.get(name) if v is None else v for name, v in given.items()}
    dtype, size, eos = merged["dtype"], merged["vocab_size"], merged["eos_token"]
    if dtype is None and not train_file.endswith(".npy"):
        why = f"{train_file} has no header, and there is no {beside.name} beside it"
        raise _refusal("data.dtype", None, why, f"one of {', '.join(TOKEN_DTYPES)}", "data.dtype=uint16")
    if size is None and dtype == "uint8":
        size = 256
    if size is None:
        why = "counting the tokens of a big file takes too long"
        fix = "data.vocab_size=<its number of different tokens>"
        raise _refusal("data.vocab_size", "auto", why, f"a number here or in {beside.name}", fix)
    if eos is not None and not 0 <= eos < size:
        expected = f"a token from 0 to {size - 1}"
        raise _refusal("data.eos_token", eos, f"not a token of {size}", expected, "data.eos_token=null")
    return TokenFormat(dtype, size, eos)


def _read_format(path: Path) -> dict[str, Any]:
    try:
        stated = parse_json(read_text(path, limit=2**20))
        if stated.get("dtype", TOKEN_DTYPES[0]) in TOKEN_DTYPES and all(
            isinstance(stated.get(name, 1), int) for name in ("vocab_size", "eos_token")
        ):
            return stated
        reason = f"dtype is one of {', '.join(TOKEN_DTYPES)}, vocab_size and eos_token are integers"
    except (OSError, ValueError, AttributeError) as error:
        reason = str(error)
    expected = '{"dtype": "uint16", "vocab_size": 50257, "eos_token": 50256}'
    raise _refusal("data.train_file", str(path), f"not understood ({reason})", expected, f"remove {path}")


def _check_token_files(data: DictConfig) -> int:
    for name in ("train_file", "val_file"):
        path = data.get(name)
        if path is not None:
            if not Path(path).expanduser().is_file():
                key = f"data.{name}"
                raise _refusal(key, path, "no such file", "a .npy or raw file", f"{key}=<existing file>")
            _check_readable(f"data.{name}", str(Path(path).expanduser()))
    files = {name: Path(data[name]).expanduser() for name in ("train_file", "val_file") if data[name]}
    if len({_identity(path) for path in files.values()}) < len(files):
        why = "the file that is trained on"
        raise _refusal("data.val_file", data.val_file, why, "another file", "data.val_file=null")
    known = token_format(
        data.train_file, dtype=data.dtype, vocab_size=data.vocab_size, eos_token=data.eos_token
    )
    if known.vocab_size > LARGEST_VOCABULARY:
        expected = f"at most {LARGEST_VOCABULARY}"
        raise _refusal(
            "data.vocab_size", known.vocab_size, "no tokenizer has so many", expected, "data.vocab_size=50257"
        )
    for name, path in files.items():
        check_tokens(f"data.{name}", path, known.dtype)
    if data.packing == "documents" and known.eos_token is None:
        why = "data.eos_token=null, so nobody knows where documents end"
        raise _refusal(
            "data.packing", "documents", why, "concat, or the token that ends them", "data.packing=concat"
        )
    if data.tokenizer == "bytes" and known.vocab_size > 256:
        why = f"the files have {known.vocab_size} different tokens"
        raise _refusal("data.tokenizer", "bytes", why, "null or a tokenizer.json", "data.tokenizer=null")
    if data.tokenizer not in (None, "bytes"):
        expand_files("data.tokenizer", [data.tokenizer])
    return known.vocab_size


def _check_tokenizer(data: DictConfig) -> int | None:
    """Returns the vocabulary where it is known: that of bpe depends on the text."""
    size = data.vocab_size
    if data.tokenizer == "bytes":
        if size not in ("auto", 256):
            why, fix = "data.tokenizer=bytes has 256 tokens", "data.tokenizer=bpe"
            raise _refusal("data.vocab_size", size, why, "auto, or a trained tokenizer", fix)
        return 256
    if size != "auto" and (not isinstance(size, int) or size < 257):
        why = "data.tokenizer=bpe begins with 256 bytes and the end of a document"
        raise _refusal("data.vocab_size", size, why, "auto or at least 257", "data.vocab_size=auto")
    if size != "auto" and size > LARGEST_VOCABULARY:
        expected = f"auto, or 257 to {LARGEST_VOCABULARY}"
        raise _refusal("data.vocab_size", size, "no text has so many", expected, "data.vocab_size=auto")
    return None


def _check_text_files(data: DictConfig) -> None:
    check_encoding(data.encoding)
    validation = expand_files("data.val_files", data.val_files)
    training = without(expand_files("data.files", data.files), validation)
    if not training:
        why = "every file to train on is named here, too, and what is validated on is not trained on"
        raise _refusal(
            "data.val_files", list(data.val_files), why, "other files than data.files", "data.val_files=[]"
        )
    replaces = data.tokenizer != "bytes"
    for key, files in (("data.files", training), ("data.val_files", validation)):
        for path in files[:_LOOKED_AT]:
            check_text(key, path, encoding=data.encoding, replaces=replaces)
    check_separator(data.separator, [*training, *validation], encoding=data.encoding)


def _check_readable(key: str, path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
        reason = None if stat.S_ISREG(status.st_mode) else "not a regular file"
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
    if reason is None and not os.access(path, os.R_OK):
        reason = "cannot be read"
    if reason is not None:
        raise _refusal(key, path, reason, "a readable file", f"{key}=<such a file>")
    return status.st_dev, status.st_ino


def _refusal(key: str, value: object, why: str, expected: str, fix: str) -> ConfigError:
    return ConfigError(key, value, why, expected=expected, fix=fix)
