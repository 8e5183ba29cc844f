"""Reading checkpoints with torch's DCP, without running what is in them.

DCP reads `.metadata` with `pickle.load`, objects with `torch.load(weights_only=False)`, and opens whatever path the
metadata names. Here it is given the metadata that `tracking/stored.py` has checked, the same object every time, and
reads tensors and plain values out of regular files of the folder only.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Size, Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future
from typing_extensions import override

from sidestream.tracking import stored
from sidestream.tracking.integrity import Damaged
from sidestream.tracking.untrusted import Unreadable, open_regular, printable, read_bytes

META_LIMIT = 1 << 30  # bytes of meta.pt; it holds random states, five kilobytes for each rank


class CheckpointReader(dcp.FileSystemReader):
    """Reads one checkpoint folder.

    Raises:
        Damaged: Its metadata is not what torch writes.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        try:
            self._metadata = _torch_metadata(stored.read(folder))
        except Unreadable as error:
            raise Damaged(folder, str(error)) from None

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            try:
                with open_regular(self.folder / place.relative_path) as file:
                    file.seek(place.offset)
                    self._take(item, io.BytesIO(file.read(place.length)), planner)
            except Damaged:
                raise
            except Exception as error:  # what torch.load says of bytes that are no tensor
                why = f"{place.relative_path}: {printable(item.storage_index.fqn)}: {printable(error)}"
                raise Damaged(self.folder, why) from None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _take(self, item: ReadItem, content: io.BytesIO, planner: LoadPlanner) -> None:
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, content)
            return
        whole = load_plain(content)
        if type(whole) is not Tensor or whole.layout != torch.strided:
            raise ValueError("no plain tensor")
        part = narrow_tensor_by_index(whole, item.storage_offsets, item.lengths)
        target = planner.resolve_tensor(item).detach()
        if target.size() != part.size():
            raise ValueError(f"is of size {tuple(part.size())}, not {tuple(target.size())}")
        target.copy_(part)
        planner.commit_tensor(item, target)


class _Planner(DefaultLoadPlanner):
    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # The parent's reads any pickle. It takes what it is given apart by itself, so it is given a plain one.
        plain = io.BytesIO()
        torch.save(load_plain(value), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def load_plain(content: io.BytesIO) -> Any:
    """Returns what `torch.save` wrote, if it holds nothing but tensors and plain values.

    Raises:
        Exception: Anything else, among others a compressed archive: a few bytes of it could fill memory.
    """
    with zipfile.ZipFile(content) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError("compressed")
    content.seek(0)
    return torch.load(content, map_location="cpu", weights_only=True)


def load_state(state: dict[str, Any], reader: CheckpointReader, *, alone: bool = False) -> None:
    """Fill the tensors of `state` in place. Collective, unless `alone`.

    Raises:
        Damaged: A file is not what it should be.
        ValueError, RuntimeError: The checkpoint has other tensors.
    """
    with plain_errors():
        dcp.load(state, storage_reader=reader, planner=_Planner(), no_dist=alone)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Raises what went wrong on the first rank, not the exception of DCP, which `except Exception` does not see."""
    try:
        yield
    except CheckpointException as error:
        raise error.failures[min(error.failures)][0] from None


def load_meta(folder: Path) -> dict[str, Any]:
    """Returns the content of meta.pt: what a checkpoint holds beside tensors and optimizer, in plain types.

    Raises:
        Damaged: It is missing, or holds anything else.
    """
    try:
        content = read_bytes(folder / "meta.pt", inside=folder, limit=META_LIMIT)
        found = load_plain(io.BytesIO(content))
    except Exception as error:
        raise Damaged(folder, f"meta.pt: {printable(error)}") from None
    if not isinstance(found, dict) or not isinstance(found.get("sidestream"), dict):
        raise Damaged(folder, "meta.pt: not written by a run")
    return found


def _torch_metadata(content: stored.Stored) -> Metadata:
    entries: dict[str, Any] = {name: BytesStorageMetadata() for name in content.values}
    places = {MetadataIndex(name): _info(place) for name, place in content.values.items()}
    for name, tensor in content.tensors.items():
        chunks = [ChunkStorageMetadata(Size(part.offsets), Size(part.sizes)) for part in tensor.parts]
        properties = TensorProperties(dtype=getattr(torch, tensor.dtype))
        entries[name] = TensorStorageMetadata(properties, Size(tensor.size), chunks)
        places |= {MetadataIndex(name, part.offsets): _info(part.place) for part in tensor.parts}
    return Metadata(entries, dict(content.paths), places, StorageMeta())


def _info(place: stored.Place) -> _StorageInfo:
    return _StorageInfo(place.file, place.start, place.length)
