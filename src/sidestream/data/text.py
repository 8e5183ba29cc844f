"""Your own text files."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from sidestream.config.data_content import check_not_utf8, check_text, never_occurs, what_else, wrong_encoding
from sidestream.config.data_files import expand_files, file_states, without
from sidestream.config.errors import ConfigError
from sidestream.data.documents import Document, DocumentSource

_NOTED = 3  # files that are told


@dataclass(frozen=True, kw_only=True)
class TextFiles(DocumentSource):
    """`data=text`: files in the order of their paths. A document is a file, or a part of one.

    Attributes:
        files: Paths and globs (`**` for folders at any depth), from the current folder.
        val_files: The same for validation, left out of `files`; empty means by `val_fraction`.
        separator: Text that ends a document within a file (it is left out); None: each file is one document.
        encoding: Encoding of the files; what is not `utf-8` is read as it and kept as UTF-8.
    """

    files: list[str]
    val_files: list[str]
    separator: str | None = None
    encoding: str = "utf-8"

    name: ClassVar[str] = "text"

    def documents(self) -> Iterator[Document]:
        validation = expand_files("data.val_files", self.val_files)
        training = without(expand_files("data.files", self.files), validation)
        for path in training:
            yield from self._read(path, "data.files", False if validation else None)
        for path in validation:
            yield from self._read(path, "data.val_files", True)
        if self.intake.separators == 0:
            raise never_occurs(self.separator or "", [*training, *validation], encoding=self.encoding)

    def identity(self) -> object:
        files = expand_files("data.files", self.files)
        return [
            file_states(files),
            file_states(expand_files("data.val_files", self.val_files)),
            self.separator,
            *([] if self.encoding == "utf-8" else [self.encoding]),
        ]

    def _read(self, path: Path, key: str, validation: bool | None) -> Iterator[Document]:
        separator = None if self.separator is None else self.separator.encode()
        check_text(key, path, encoding=self.encoding, replaces=self.tokenizer != "bytes")
        if (note := what_else(path, encoding=self.encoding)) and len(self.intake.notes) < _NOTED:
            self.intake.notes.append(note)
        try:
            if self.encoding == "utf-8":
                parts = _cut(path, separator)
            else:
                read = path.read_bytes()
                check_not_utf8(path, read, encoding=self.encoding)
                content = read.decode(self.encoding).encode()
                parts = iter([content] if separator is None else content.split(separator))
            for place, content in enumerate(parts):
                if separator is not None:
                    self.intake.separators = (self.intake.separators or 0) + (place > 0)
                yield Document(content, validation)
        except UnicodeError as error:
            raise wrong_encoding(path, f"not {self.encoding} ({error})", self.encoding, "utf-8") from error
        except OSError as error:
            raise ConfigError(
                key, str(path), f"cannot be read ({error})", expected="readable files", fix=f"{key}=[<files>]"
            ) from error


def _cut(path: Path, separator: bytes | None) -> Iterator[bytes]:
    """The parts of a file between separators; only one of them is in memory."""
    if separator is None or path.stat().st_size == 0:
        yield path.read_bytes()
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        begin = 0
        while (end := content.find(separator, begin)) >= 0:
            yield content[begin:end]
            begin = end + len(separator)
        yield content[begin:]
