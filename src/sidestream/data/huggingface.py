"""Data sets of the package `datasets`: from the hub, from local files, or saved with `save_to_disk`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from sidestream.config.data_files import expand_files, file_states, is_remote
from sidestream.config.errors import ConfigError
from sidestream.data.documents import Document, DocumentSource
from sidestream.data.tokenizer import import_package


@dataclass(frozen=True, kw_only=True)
class HuggingFace(DocumentSource):
    """`data=huggingface`: each row's text is a document. Read once, then only the cached tokens are used.

    A data set of the hub that changes under the same name is not noticed: name a `revision`.

    Attributes:
        dataset: Name on the hub, a folder, or a format (`json`, `parquet`, `csv`, `text`) with `data_files`.
        config_name: Configuration of the data set, where it has several.
        revision: Branch, tag or commit on the hub.
        data_files: Local paths, globs or URLs.
        split: Training rows; `train[:1000]` and the like work unless streamed or saved with `save_to_disk`.
        val_split: Validation rows; None means by `val_fraction`.
        text_column: The column with the text.
        streaming: Read rows as they are needed instead of downloading the whole data set first.
        max_documents: At most so many rows of each split; None is all of them.
    """

    dataset: str
    config_name: str | None
    revision: str | None
    data_files: list[str] | None
    split: str
    val_split: str | None
    text_column: str
    streaming: bool
    max_documents: int | None

    name: ClassVar[str] = "huggingface"

    def documents(self) -> Iterator[Document]:
        yield from self._rows(self.split, None if self.val_split is None else False)
        if self.val_split is not None:
            yield from self._rows(self.val_split, True)

    def identity(self) -> object:
        folder = Path(self.dataset).expanduser()
        local = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
        names = [self.dataset, self.config_name, self.revision, self.data_files, self.split, self.val_split]
        return [
            *names,
            self.text_column,
            self.max_documents,
            file_states(local),
            file_states(self._local_files()),
        ]

    def _local_files(self) -> list[Path]:
        return expand_files("data.data_files", [p for p in self.data_files or [] if not is_remote(p)])

    def _rows(self, split: str, validation: bool | None) -> Iterator[Document]:
        datasets = import_package("datasets", key="data", value=self.name)
        datasets.disable_progress_bars()
        try:
            found = False
            for row in islice(self._open(datasets, split), self.max_documents):
                text = row.get(self.text_column)
                if not found and self.text_column not in row:
                    raise self._wrong_column(f"the data set has the columns {', '.join(row)}")
                found = True
                if text is None:
                    self.intake.dropped[f"no {self.text_column}"] += 1
                elif isinstance(text, str):
                    yield Document(text.encode(errors="surrogatepass"), validation)
                else:
                    raise self._wrong_column(f"it holds {type(text).__name__} in split {split}, not text")
        except ConfigError:
            raise
        except (OSError, ValueError, KeyError, AttributeError, datasets.exceptions.DatasetsError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                "data.dataset",
                self.dataset,
                f"split {split} cannot be read ({reason})",
                expected="a data set that the package datasets can read",
                fix="data.dataset=<such a data set>",
            ) from error

    def _wrong_column(self, why: str) -> ConfigError:
        expected, fix = "a column of text", "data.text_column=<one of text>"
        return ConfigError("data.text_column", self.text_column, why, expected=expected, fix=fix)

    def _open(self, datasets: Any, split: str) -> Any:
        folder = Path(self.dataset).expanduser()
        if (folder / "dataset_dict.json").exists():
            return datasets.load_from_disk(str(folder))[split]
        if (folder / "state.json").exists():
            if split == self.val_split:
                raise ValueError("it was saved without splits")
            return datasets.load_from_disk(str(folder))
        remote = [path for path in self.data_files or [] if is_remote(path)]
        files = [*map(str, self._local_files()), *remote]
        return datasets.load_dataset(
            str(folder) if folder.is_dir() else self.dataset,
            self.config_name,
            revision=self.revision,
            data_files=files or None,
            split=split,
            streaming=self.streaming,
        )
