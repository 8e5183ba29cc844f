"""The text of the running interpreter's standard library as bytes: a corpus that needs no network."""

import hashlib
import os
import sysconfig
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from sidestream.config.errors import ConfigError
from sidestream.data.corpus import Corpus, DataSource
from sidestream.data.record import Intake, content_hash
from sidestream.data.store import SPLITS, Content, open_or_build
from sidestream.data.tokenizer import ByteTokenizer

# Tests and tables repeat themselves; installed packages (dist-packages on Debian) differ between machines.
_LEFT_OUT = {"test", "tests", "idle_test", "lib2to3", "encodings", "pydoc_data"}
_LEFT_OUT |= {"site-packages", "dist-packages", "__pycache__"}
_SEPARATOR = b"\0"
_FORMAT = 1  # a new number makes every cached corpus be built again


@dataclass(frozen=True, kw_only=True)
class PythonSource(DataSource):
    """`data=python_source`: bytes of the standard library's files, sorted by path, a zero between them.

    A hash of a file's path relative to the library decides whether it is for validation, so it is in the same
    split on every machine. The bytes still differ between interpreters: `Corpus.checksum` tells.

    Attributes:
        cache_dir: Folder for token files, shared by all runs; `~` is the home folder.
        val_fraction: Share of the files kept for validation, between 0 and 1.
    """

    cache_dir: str
    val_fraction: float = 0.05

    example_prompt: ClassVar[str] = "import "

    def load(self) -> Corpus:
        """Opens the cached corpus of this interpreter, or builds it (about a second).

        Raises:
            ConfigError: `val_fraction` is out of range, the cache folder cannot be used, or this interpreter
                came without its sources.
        """
        if not 0 < self.val_fraction < 1:
            raise ConfigError(
                "data.val_fraction",
                self.val_fraction,
                "both splits need files",
                expected="a number between 0 and 1",
                fix="data.val_fraction=0.05",
            )
        root = library_folder()
        paths = source_paths(root)
        if not paths:
            raise ConfigError(
                "data",
                "python_source",
                f"this Python has no source files in {root}",
                expected="an interpreter installed with its standard library as .py files",
                fix="run with an interpreter that has its sources",
            )
        folder = Path(self.cache_dir).expanduser() / "python_source" / self._key(root, paths)
        corpus = open_or_build(folder, lambda: self._build(root, paths), name="python_source")
        own = ByteTokenizer
        return replace(corpus, eos_token=own.eos_token, unit=own.unit, tokenizer=own.identity)

    def encode(self, text: str) -> list[int]:
        return ByteTokenizer().encode(text)

    def decode(self, tokens: list[int]) -> str:
        return ByteTokenizer().decode(tokens)

    def _key(self, root: Path, paths: list[str]) -> str:
        """Names the cache folder: changes with the split and with any source file, without reading them."""
        digest = hashlib.sha256(f"{_FORMAT} {self.val_fraction}\n".encode())
        for path in paths:
            status = (root / path).stat()
            digest.update(f"{path} {status.st_size} {status.st_mtime_ns}\n".encode())
        return digest.hexdigest()[:16]

    def _build(self, root: Path, paths: list[str]) -> Content:
        splits: tuple[list[bytes], list[bytes]] = ([], [])
        intake = Intake()
        for path in paths:
            validation, content = is_validation(path, self.val_fraction), (root / path).read_bytes()
            splits[validation].append(content)
            if content:  # an empty __init__.py leaves two ends of a document side by side
                intake.take(SPLITS[validation], content, content_hash(content))
            else:
                intake.dropped["empty"] += 1
        parts = [(name, _SEPARATOR.join(files)) for name, files in zip(SPLITS, splits)]
        record = partial(intake.record, zeros_end_documents=True)
        return Content(ByteTokenizer.vocab_size, parts, record=record)


def library_folder() -> Path:
    """The folder of the standard library, that of the base interpreter inside a virtual environment."""
    return Path(sysconfig.get_path("stdlib"))


def source_paths(root: Path) -> list[str]:
    """Sorted paths of the source files below `root`, relative to it, with `/`."""
    paths = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        relative = Path(folder).relative_to(root)
        paths += [(relative / name).as_posix() for name in files if name.endswith(".py")]
    return sorted(paths)


def is_validation(path: str, val_fraction: float) -> bool:
    """Whether the file with this relative path belongs to the validation split; the same on every machine."""
    digest = hashlib.sha256(path.encode()).digest()
    return int.from_bytes(digest[:8], "big") < val_fraction * 2**64
