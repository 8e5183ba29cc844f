"""What became of a data source: what was read, what was dropped and why, what is in both splits."""

from dataclasses import asdict, dataclass, field
from typing import Any

SPLITS = ("train", "val")


@dataclass(frozen=True, kw_only=True)
class DataRecord:
    """The account of a source, in result.json and as a line at the start of a run. None: not known.

    Attributes:
        documents: split -> documents.
        tokens: split -> tokens, ends of documents included.
        dropped: reason -> documents that are in neither split.
        replaced_characters: What was no UTF-8: `bpe` has U+FFFD in its place, `bytes` has it as it was.
        zero_bytes: Zeros inside of documents; with `bytes` each looks like the end of one.
        separators: Occurrences of `data.separator`.
        shared_documents: Validation documents whose content is also in the training split.
        notes: Whatever else should be looked at, a sentence each.
    """

    documents: dict[str, int | None] = field(default_factory=lambda: dict.fromkeys(SPLITS))
    tokens: dict[str, int | None] = field(default_factory=lambda: dict.fromkeys(SPLITS))
    dropped: dict[str, int] = field(default_factory=dict)
    replaced_characters: int | None = None
    zero_bytes: int | None = None
    separators: int | None = None
    shared_documents: int | None = None
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, found: dict[str, Any]) -> "DataRecord":
        """The account that `as_dict` returned, read from a file.

        Raises:
            TypeError: Something else is written there.
        """
        record = cls(**found)
        by_split, of_all = (record.documents, record.tokens), record.dropped
        if any(not isinstance(part, dict) or set(part) != set(SPLITS) for part in by_split):
            raise TypeError("documents or tokens are not counted by split")
        if not isinstance(of_all, dict) or not isinstance(record.notes, list):
            raise TypeError("dropped is no mapping, or notes is no list")
        counts = [count for part in (*by_split, of_all) for count in part.values()]
        counts += [record.replaced_characters, record.zero_bytes, record.separators, record.shared_documents]
        if any(count is not None and type(count) is not int for count in counts):
            raise TypeError("a count is no integer")
        if not all(isinstance(note, str) for note in record.notes):
            raise TypeError("a note is no text")
        return record

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        """The numbers in one line."""
        parts = []
        if None not in self.documents.values():
            parts.append(_pair(self.documents, "documents"))
        parts.append(_pair(self.tokens, "tokens"))
        if self.separators is not None:
            parts.append(f"{self.separators:,} separators")
        parts += [f"{count:,} left out: {reason}" for reason, count in sorted(self.dropped.items())]
        return "; ".join(parts)

    def warnings(self) -> list[str]:
        """What a person should know before believing a loss, a sentence each."""
        lost = {reason: count for reason, count in self.dropped.items() if reason != "empty"}
        found = [f"{count:,} documents left out: {reason}" for reason, count in sorted(lost.items())]
        if self.replaced_characters:
            found.append(f"{self.replaced_characters:,} characters were no UTF-8")
        if self.zero_bytes:
            found.append(f"{self.zero_bytes:,} zero bytes inside of documents read as ends of documents")
        if self.shared_documents:
            share = self.shared_documents / max(self.documents["val"] or 1, 1)
            found.append(
                f"{self.shared_documents:,} validation documents ({share:.1%}) are in the training split too"
            )
        return [*found, *self.notes]


def _pair(counts: dict[str, int | None], what: str) -> str:
    train, val = ("-" if counts[split] is None else f"{counts[split]:,}" for split in SPLITS)
    return f"{train} + {val} {what}"
