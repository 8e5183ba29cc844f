"""A Hugging Face folder, read as data from anybody: config.json, and which tensors its files hold. No torch.

Files are regular and inside the folder. One layout beside it is known: the cache of huggingface_hub, where
`models--x--y/snapshots/<revision>/` holds links to `models--x--y/blobs/`.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from sidestream.config.errors import ConfigError
from sidestream.convert.families import family_of, model_options
from sidestream.tracking.untrusted import LIMIT, Unreadable, open_regular, printable, read_text

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Bytes of the dtypes that weights may have here.
_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
# ... and of the others that a file may have.
_OTHER_BYTES = {
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
    "C64": 8,
}
_OTHER_BYTES |= {"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1}


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor is, and what."""

    file: str
    dtype: str
    shape: tuple[int, ...]


class ModelFolder:
    """What is in a Hugging Face folder. Whatever is wrong with it is a ConfigError of one line that names the file.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json."""
        return self._json("config.json")

    @cached_property
    def tensors(self) -> dict[str, TensorPlace]:
        """Every tensor by name, from the heads of the files; no weight is read."""
        index = self._index
        files = [SINGLE] if index is None else sorted(set(index.values()))
        found: dict[str, TensorPlace] = {}
        for file in files:
            for name, stored in self._head(file):
                if name in found:
                    raise self.refused(file, f"holds {printable(name)}, which {found[name].file} holds too")
                found[name] = stored
        for name, file in (index or {}).items():
            if name not in found or found[name].file != file:
                raise self.refused(
                    INDEX, f"says that {printable(name)} is in {printable(file)}, where it is not"
                )
        if index is not None and (more := sorted(found.keys() - index.keys())):
            raise self.refused(
                INDEX, f"does not name {printable(more[0])}, which {found[more[0]].file} holds"
            )
        return found

    def locate(self, name: str) -> Path:
        """The real path of a file of the folder.

        Raises:
            ConfigError: Its name or a link leads out.
        """
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or "\0" in name:
            raise self.refused(name, "leads out of the folder")
        try:
            folder, real = self.path.resolve(), (self.path / name).resolve()
        except (OSError, RuntimeError):
            raise self.refused(name, "a loop of links") from None
        roots = [folder, *([folder.parents[1] / "blobs"] if folder.parent.name == "snapshots" else [])]
        if not any(real.is_relative_to(root) for root in roots):
            raise self.refused(name, "leads out of the folder")
        return real

    def check_tensors(self) -> None:
        """Hold the files against config.json: every tensor there, none unknown, each with its shape, as floats.

        Raises:
            ConfigError: Names the tensor.
        """
        family, options = family_of(self.config), model_options(self.config)["model"]
        wanted = dict(family.tensors(options))
        for name, shape in wanted.items():
            if name not in self.tensors:
                if name == "lm_head.weight" and options["tie_embeddings"]:
                    continue
                raise self.refused(name, "this tensor is missing")
            stored = self.tensors[name]
            if stored.shape != shape:
                why = f"{list(stored.shape)} in {printable(stored.file)}, and config.json asks for {list(shape)}"
                raise self.refused(name, why)
            if stored.dtype not in _BYTES:
                raise self.refused(name, f"stored as {stored.dtype}: no weights of a model that trains")
        unknown = [n for n in self.tensors.keys() - wanted.keys() if not n.endswith("rotary_emb.inv_freq")]
        if unknown:
            first = min(unknown)
            why = f"{len(unknown)} tensors have no place in a model of this config.json, first {printable(first)}"
            raise self.refused(self.tensors[first].file, why)

    def refused(self, what: str, why: str) -> ConfigError:
        """The refusal of a file or a tensor of this folder."""
        return ConfigError(
            "initial_weights",
            printable(self.path),
            f"{printable(what)}: {why}",
            expected="a folder written by save_pretrained or downloaded whole",
            fix="initial_weights=<such a folder>",
        )

    @cached_property
    def _index(self) -> dict[str, str] | None:
        """Tensor -> file, where the weights are in several files. As in transformers, a single file comes first."""
        if os.path.lexists(self.path / SINGLE):
            return None
        if not os.path.lexists(self.path / INDEX):
            raise self.refused(*self._what_is_there())
        weight_map = self._json(INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise self.refused(INDEX, "has no weight_map")
        if not all(isinstance(file, str) and file.endswith(".safetensors") for file in weight_map.values()):
            raise self.refused(INDEX, "its weight_map names something else than safetensors files")
        return weight_map

    def _what_is_there(self) -> tuple[str, str]:
        names = sorted(path.name for path in self.path.glob("*")) if self.path.is_dir() else []
        if files := [name for name in names if name.endswith(".safetensors")]:
            return INDEX, f"missing, with {len(files)} weight files, first {printable(files[0])}"
        if pickled := [name for name in names if name.endswith((".bin", ".pt", ".pth"))]:
            return pickled[0], "weights in pickle files are not read: they can run code"
        return SINGLE, "no weights in the folder"

    def _json(self, name: str) -> dict[str, Any]:
        with self._naming(name):
            return _parse(read_text(self.locate(name)))

    def _head(self, file: str) -> list[tuple[str, TensorPlace]]:
        """The tensors of a safetensors file: 8 bytes of length, JSON, then the data without gaps."""
        with self._naming(file), open_regular(self.locate(file)) as opened:
            size = os.fstat(opened.fileno()).st_size
            length = int.from_bytes(opened.read(8), "little")
            if size < 8 or length > size - 8 or length > LIMIT:
                raise ValueError("truncated, or no safetensors file")
            head = _parse(opened.read(length).decode("utf-8"))
            head.pop("__metadata__", None)
            found, end = [], 0
            for name, entry in sorted(head.items(), key=lambda item: _offsets(item[1])):
                stored, end = _stored(file, name, entry, begin=end)
                found.append((name, stored))
            if end != size - 8 - length:
                raise ValueError(f"{size:,} bytes, where its head says {8 + length + end:,}: not whole")
            return found

    @contextmanager
    def _naming(self, file: str) -> Iterator[None]:
        """Refuse the file when reading it fails."""
        try:
            yield
        except ConfigError:
            raise
        except Unreadable as error:  # says the real path first, which may be a blob of a cache
            raise self.refused(file, str(error).rpartition(": ")[2]) from None
        except ValueError as error:
            raise self.refused(file, printable(error, limit=160)) from None


def _parse(text: str) -> dict[str, Any]:
    """A JSON object in which no key stands twice.

    Raises:
        ValueError: It is something else.
    """
    try:
        content = json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"expected an object, found {type(content).__name__}")
    return content


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{printable(twice)} stands in it twice")
    return content


def _offsets(entry: Any) -> tuple[int, int]:
    match entry:
        case {"data_offsets": [int(begin), int(end)]}:
            return begin, end
    raise ValueError("its head is damaged")


def _stored(file: str, name: str, entry: Mapping[str, Any], *, begin: int) -> tuple[TensorPlace, int]:
    shape, dtype, offsets = entry.get("shape"), entry.get("dtype"), entry["data_offsets"]
    sizes = _BYTES | _OTHER_BYTES
    if (
        not isinstance(shape, list)
        or not all(isinstance(n, int) and n >= 0 for n in shape)
        or not isinstance(dtype, str)
        or dtype not in sizes
    ):
        raise ValueError(f"{printable(name)} has no shape or no dtype that is known")
    end = begin + math.prod(shape) * sizes[dtype]
    if offsets != [begin, end]:
        raise ValueError(f"the place of {printable(name)} does not fit its shape and dtype")
    return TensorPlace(file, dtype, tuple(shape)), end
