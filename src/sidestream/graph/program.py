"""What a recording does, as calls that write where they wrote: the program of a tape.

Reserving memory and making views is not repeated: places are fixed. Everything else is: in-place operators as they
are, others through their `out=` variant, and where there is none the result is copied to its place. Operators whose
results nobody reads are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from sidestream.graph.arena import Placement, plan
from sidestream.graph.recording import RESERVES, STARTS, WAITS, Entry, Recording, View

Call = Callable[[], Any]
_FACTORY = {"dtype", "layout", "device", "pin_memory", "memory_format", "non_blocking"}
_ARITHMETIC = {"mul", "div"}  # `add` and `sub` of a number take a factor as well
_COPIES = {"aten::_to_copy", "aten::clone"}
_ZEROS = {"aten::zeros", "aten::zeros_like", "aten::new_zeros"}
_ONES = {"aten::ones", "aten::ones_like", "aten::new_ones"}
_FULL = {"aten::full", "aten::full_like", "aten::new_full"}


def needed_entries(recording: Recording) -> list[Entry]:
    """The entries that a replay must run, in their order."""
    storages = recording.storages
    read = {index for index, s in enumerate(storages) if s.outside is not None or s.pinned is not None}
    kept: list[Entry] = []
    for entry in reversed(recording.entries):
        made = {out.storage for out in entry.outs if out is not None}
        if not entry.writes and not made:
            continue  # a view
        if entry.name in RESERVES:
            continue
        draws = torch.Tag.nondeterministic_seeded in entry.op.tags
        acts = draws or entry.ticket is not None or not entry.name.startswith("aten::")
        if acts or read & (made | entry.writes):
            kept.append(entry)
            read |= entry.reads | entry.writes
    return kept[::-1]


def lifetimes(recording: Recording, entries: list[Entry]) -> dict[int, tuple[int, int]]:
    """Storage -> its first and last use among `entries`. What an exchange touches is used until its wait."""
    spans: dict[int, tuple[int, int]] = {}
    flying: dict[int, set[int]] = {}
    for time, entry in enumerate(entries):
        used = {view.storage for view in entry.views}
        if entry.ticket is not None:
            if entry.name in STARTS:
                flying[entry.ticket] = used
            elif entry.name in WAITS:
                used |= flying.pop(entry.ticket, set())
        for index in used:
            spans[index] = (spans.get(index, (time, 0))[0], time)
    fixed = {i for i, s in enumerate(recording.storages) if s.outside is not None or s.pinned is not None}
    return {index: span for index, span in spans.items() if index not in fixed}


class Program:
    """The calls of a replay and their memory.

    Args:
        recording: Without findings.

    Attributes:
        plan: Places of the storages made inside.
        calls: To be made in this order.
        kept: Whatever the calls need and do not hold.
    """

    def __init__(self, recording: Recording) -> None:
        entries = needed_entries(recording)
        sizes = {index: storage.nbytes for index, storage in enumerate(recording.storages)}
        self.plan: Placement = plan(lifetimes(recording, entries), sizes)
        self.arena = torch.empty(self.plan.nbytes, dtype=torch.uint8)
        self._places: dict[View, Tensor] = {}
        self._recording = recording
        self.kept = [entry.kept for entry in entries]
        read_later = _read_later(entries, recording)
        self.calls: list[Call] = [self._call(entry, read_later[i]) for i, entry in enumerate(entries)]
        # Names, sizes and places are all in the calls now; weak references would keep dead storages' headers.
        self.kept += [s.outside or s.pinned for s in recording.storages if s.outside or s.pinned]
        del self._recording, self._places

    def _tensor(self, view: View) -> Tensor:
        found = self._places.get(view)
        if found is None:
            storage = self._recording.storages[view.storage]
            fixed = storage.outside if storage.outside is not None else storage.pinned
            empty = torch.empty(0, dtype=view.dtype)
            if fixed is not None:
                found = empty.set_(fixed, view.offset, view.size, view.stride)
            else:
                begin = self.plan.offsets.get(view.storage, 0) // view.dtype.itemsize
                found = empty.set_(self.arena.untyped_storage(), begin + view.offset, view.size, view.stride)
            self._places[view] = found
        return found

    def _call(self, entry: Entry, read_later: set[int]) -> Call:
        leaves = [self._tensor(leaf) if isinstance(leaf, View) else leaf for leaf in entry.leaves]
        args, kwargs = tree_unflatten(leaves, entry.spec)
        outs = [None if out is None else self._tensor(out) for out in entry.outs]
        if entry.writes and not any(out is not None for out in outs):
            return partial(entry.op, *args, **kwargs) if kwargs else partial(entry.op, *args)
        if (fill := _fill(entry, args, kwargs, outs)) is not None:
            return fill
        if (scalar := _with_number(entry, args, kwargs, outs)) is not None:
            return scalar
        if not entry.writes and (direct := _into(entry.op, args, kwargs, outs)) is not None:
            return direct
        wanted = [
            out if place is not None and place.storage in read_later else None
            for out, place in zip(outs, entry.outs)
        ]
        return partial(_run_and_copy, entry.op, args, kwargs, wanted)


def _read_later(entries: list[Entry], recording: Recording) -> list[set[int]]:
    """Per entry, the storages that an entry behind it reads."""
    later: set[int] = {i for i, s in enumerate(recording.storages) if s.outside or s.pinned}
    found: list[set[int]] = []
    for entry in reversed(entries):
        made = {out.storage for out in entry.outs if out is not None}
        found.append(later & made)
        later = later | entry.reads | entry.writes
    return found[::-1]


def _fill(entry: Entry, args: Any, kwargs: Any, outs: list[Tensor | None]) -> Call | None:
    out = outs[0]
    if out is None or len(outs) != 1:
        return None
    if entry.name in _COPIES:
        return partial(torch.ops.aten.copy_.default, out, args[0])
    if entry.name in _ZEROS:
        return out.zero_
    if entry.name in _ONES:
        return partial(out.fill_, 1)
    if entry.name in _FULL:
        return partial(out.fill_, kwargs.get("fill_value", args[-1]))
    return None


def _with_number(entry: Entry, args: Any, kwargs: Any, outs: list[Tensor | None]) -> Call | None:
    """`x * 2.0` has no `out=` variant; Python's binding makes a tensor of the number, as the operator does."""
    name, _, overload = entry.op.name().partition("::")[2].partition(".")
    if overload != "Scalar" or name not in _ARITHMETIC or kwargs or len(outs) != 1 or outs[0] is None:
        return None
    return partial(getattr(torch, name), *args, out=outs[0])


def _run_and_copy(op: Any, args: Any, kwargs: Any, outs: list[Tensor | None]) -> None:
    for out, value in zip(outs, tree_flatten(op(*args, **kwargs))[0]):
        if out is not None:
            out.copy_(value)


def _into(op: Any, args: Any, kwargs: Any, outs: list[Tensor | None]) -> Call | None:
    """The call with `out=`; None if the operator has no such variant."""
    found = _out_variant(op)
    if found is None or any(out is None for out in outs):
        return None
    variant, names, accepted = found
    if len(names) != len(outs):
        return None
    given = {name: value for name, value in kwargs.items() if name in accepted}
    return partial(variant, *args, **given, **dict(zip(names, outs)))


@cache
def _out_variant(op: Any) -> tuple[Any, tuple[str, ...], frozenset[str]] | None:
    """The overload that writes to given places, with the names of these and of its other arguments."""
    packet = op.overloadpacket
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments if a.name not in _FACTORY]
    for name in packet.overloads():
        overload = getattr(packet, name)
        arguments = overload._schema.arguments
        outs = [a for a in arguments if a.is_out]
        others = [a for a in arguments if not a.is_out]
        if not outs or len(outs) != len(op._schema.returns):
            continue
        if any(str(a.type) != "Tensor" for a in outs):
            continue
        if [(a.name, str(a.type)) for a in others if a.name not in _FACTORY] == wanted:
            # Made from the plain operator, it would only copy.
            if torch.Tag.generated in overload.tags and not _is_native(overload):
                return None
            return overload, tuple(a.name for a in outs), frozenset(a.name for a in others)
    return None


def _is_native(overload: Any) -> bool:
    """Whether the variant has a kernel of its own on the CPU."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CPU")
