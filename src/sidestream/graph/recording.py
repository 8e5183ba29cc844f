"""`Recording`: what a function does, operator by operator, with where every tensor lies.

    with Recording() as recording:
        attempt()                    # forward and backward, run once as they are written
    recording.entries                # what was called on which memory
    recording.findings               # what could not be repeated from it

A dispatch mode sees every operator, those of autograd's backward too. Tensors are noted by their storage, never held:
while recording runs memory is freed as always. A storage that no recorded operator made is *outside*: a parameter, a
gradient, a static input, a cache. It is held, and must be the same one at every replay.

Operators on DTensors are seen as what they do to the local tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from sidestream.graph.findings import Finding

# Operators that only reserve memory.
RESERVES = {
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided",
}  # fmt: skip
STARTS = {"sidestream::start_", "sidestream::call_", "sidestream::sum_"}
WAITS = {"sidestream::wait_", "sidestream::wait_call_"}
_SKIPPED = ("profiler::", "prim::")
_MOVES_STORAGE = {"aten::set_", "aten::resize_", "aten::resize_as_"}


@dataclass(frozen=True)
class View:
    """A tensor as a place: elements of one storage.

    Attributes:
        storage: Index into `Recording.storages`.
        offset: In elements.
    """

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass
class Storage:
    """Memory that the recording met.

    Attributes:
        nbytes: Size.
        outside: Holds the storage if no recorded operator made it; None otherwise.
        pinned: Made by a recorded call, and staying where it is.
        written: Something was written into it.
    """

    nbytes: int
    outside: torch.UntypedStorage | None = None
    pinned: torch.UntypedStorage | None = None
    written: bool = True


@dataclass(frozen=True)
class Entry:
    """One operator call.

    Attributes:
        op: The overload.
        leaves: Flattened arguments, tensors as `View`.
        spec: Tree of (args, kwargs).
        outs: Tensors of the result that have memory of their own, as places; None for those that alias an argument
            and for what is no tensor.
        writes: Storages that the call changes in place.
        reads: Storages whose content it needs.
        ticket: Number of the exchange it belongs to.
        kept: What must live as long as the entry.
    """

    op: Any
    leaves: list[Any]
    spec: Any
    outs: list[View | None]
    writes: frozenset[int]
    reads: frozenset[int]
    ticket: int | None = None
    kept: Any = None

    @property
    def name(self) -> str:
        return self.op._schema.name

    @property
    def views(self) -> Iterator[View]:
        """Every place that the call touches."""
        yield from (leaf for leaf in self.leaves if isinstance(leaf, View))
        yield from (out for out in self.outs if out is not None)


class Recording(TorchDispatchMode):
    """Context manager. One use.

    Args:
        known: Storages that an earlier run saw outside: others there are findings. None: nothing is checked.
        keep: Keep the entries; False only looks at storages.
    """

    def __init__(self, *, known: Outside | None = None, keep: bool = True) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self.storages: list[Storage] = []
        self.findings: list[Finding] = []
        self._known, self._keep = known, keep
        self._index: dict[int, int] = {}
        self._weak: list[StorageWeakRef] = []  # while they live, no other storage gets the same address
        self._flights: dict[int, Finding] = {}

    def outside(self) -> Outside:
        """The storages that nothing in the recording made."""
        held = [s.outside for s in self.storages if s.outside is not None]
        return Outside({storage._cdata for storage in held}, held)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.findings += self._flights.values()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        kwargs = kwargs or {}
        name = func._schema.name
        if name.startswith(_SKIPPED):
            return func(*args, **kwargs)
        before, read, written, ticket = self._arguments(func, args, kwargs)
        result = func(*args, **kwargs)
        self._note(func, args, kwargs, result, before=before, read=read, written=written, ticket=ticket)
        return result

    def _arguments(
        self, func: Any, args: Any, kwargs: Any
    ) -> tuple[set[int], set[int], set[int], int | None]:
        """Storages among the arguments: all, those whose content is needed, those that are written; the ticket."""
        every: set[int] = set()
        read: set[int] = set()
        written: set[int] = set()
        ticket = None
        for argument, value in _named(func, args, kwargs):
            if argument.name == "ticket":
                ticket = value
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(value):
                index = self._see(tensor, func)
                every.add(index)
                (written if writes else read).add(index)
        return every, read, written, ticket

    def _note(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        result: Any,
        *,
        before: set[int],
        read: set[int],
        written: set[int],
        ticket: int | None,
    ) -> None:
        name = func._schema.name
        if name in _MOVES_STORAGE:
            self._find("moving memory", name.partition("::")[2])
        if name.startswith(("c10d::", "_c10d_functional::")):
            self._find("collective", name.partition("::")[2])
        leaves, spec = tree_flatten((list(args), dict(kwargs)))
        # After the call: a library may have given memory to an empty tensor.
        views = [self._view(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        arguments = {view.storage for view in views if isinstance(view, View)}
        for index in arguments - before:
            self.storages[index].pinned, self.storages[index].outside = self.storages[index].outside, None
            written.add(index)
        outs: list[View | None] = []
        for each in _flat(result):
            if not isinstance(each, Tensor):
                outs.append(None)
                continue
            key = each.untyped_storage()._cdata
            known = self._index.get(key)
            if known is not None and known in arguments:
                outs.append(None)
                continue
            self._add(each.untyped_storage(), outside=False, written=name not in RESERVES)
            outs.append(self._view(each))
        is_view = bool(outs) and all(out is None for out in outs) and not written
        if not is_view:
            for index in read:
                self._check_written(index, func)
        for index in written:
            self.storages[index].written = True
        self._flight(name, ticket)
        if self._keep:
            kept = None
            if name == "sidestream::call_":
                from sidestream.exchange.call import registered

                kept = registered(args[3] if len(args) > 3 else kwargs["call"])
            self.entries.append(
                Entry(func, views, spec, outs, frozenset(written), frozenset(read | arguments), ticket, kept)
            )

    def _flight(self, name: str, ticket: int | None) -> None:
        if name in STARTS and ticket is not None:
            self._flights[ticket] = Finding.here("unjoined exchange", name.partition("::")[2])
        elif name in WAITS and ticket is not None and self._flights.pop(ticket, None) is None:
            self._find("unjoined exchange", f"{name.partition('::')[2]} for an exchange started earlier")

    def _see(self, tensor: Tensor, func: Any) -> int:
        """Index of an argument's storage."""
        storage = tensor.untyped_storage()
        index = self._index.get(storage._cdata)
        if index is not None:
            return index
        if func._schema.name.startswith("aten::lift_fresh"):
            self._find("host constant", "tensor")
            return self._add(storage, outside=True, written=True)
        if self._known is not None and storage._cdata not in self._known.keys and storage.nbytes():
            self._find("undeclared input", func._schema.name.partition("::")[2])
        return self._add(storage, outside=True, written=True)

    def _add(self, storage: torch.UntypedStorage, *, outside: bool, written: bool) -> int:
        index = self._index[storage._cdata] = len(self.storages)
        self.storages.append(Storage(storage.nbytes(), storage if outside else None, None, written))
        self._weak.append(StorageWeakRef(storage))
        return index

    def _view(self, tensor: Tensor) -> View:
        storage = tensor.untyped_storage()
        index = self._index.get(storage._cdata)
        if index is None:
            index = self._add(storage, outside=True, written=True)
        assert not tensor.is_conj() and not tensor.is_neg(), "complex views are not recorded"
        self.storages[index].nbytes = max(self.storages[index].nbytes, storage.nbytes())
        return View(index, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def _check_written(self, index: int, func: Any) -> None:
        storage = self.storages[index]
        if not storage.written and storage.nbytes:
            self._find("never written", func._schema.name.partition("::")[2])
            storage.written = True  # once is enough

    def _find(self, kind: str, what: str) -> None:
        self.findings.append(Finding.here(kind, what))


@dataclass
class Outside:
    """Storages that a run used and did not make; they stay alive with this object."""

    keys: set[int] = field(default_factory=set)
    held: list[torch.UntypedStorage] = field(default_factory=list)


def _named(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """The arguments of the schema with their values."""
    for position, argument in enumerate(func._schema.arguments):
        if position < len(args):
            yield argument, args[position]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _flat(result: Any) -> Iterable[Any]:
    return tree_flatten(result)[0]
