"""What the contract doubles share: late work, raw pointers, garbage, agreement between ranks, and where rows lie.

Legend: T tokens, K routes per token, H features, E experts, R ranks, L = E / R local experts, P output rows.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class ContractError(RuntimeError):
    """The library would have failed, silently or loudly."""


class InvalidArgument(ContractError):
    """The library's own check refuses the call."""


class UseAfterFree(ContractError):
    """A raw pointer is read or written after its tensor died."""


class InputChanged(ContractError):
    """An input was written before the work that reads it ran."""


class Hang(ContractError):
    """The library would wait for ever; raised on every rank instead."""


class Trap(ContractError):
    """The device traps and the process dies."""


class DeviceAssert(ContractError):
    """An assertion in a kernel."""


class Corruption(ContractError):
    """The library would write where it must not, or return wrong numbers, without a word."""


class TeardownOrder(ContractError):
    """Something was destroyed before what depends on it, twice, or not at all."""


class Disagreement(ContractError):
    """The ranks made different calls."""


def require(condition: bool, message: str, error: type[ContractError] = InvalidArgument) -> None:
    if not condition:
        raise error(message)


# Time.


class Stream:
    """In-order work that runs when somebody waits for it: as late as a device may be."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], None]] = deque()
        self._launched = self._done = 0

    def enqueue(self, work: Callable[[], None]) -> None:
        self._queue.append(work)
        self._launched += 1

    def mark(self) -> int:
        """What an event recorded now would wait for."""
        return self._launched

    def run_until(self, mark: int) -> None:
        while self._done < mark and self._queue:
            work = self._queue.popleft()
            try:
                work()
            except BaseException:
                self._queue.clear()
                self._done = self._launched
                raise
            self._done += 1

    def synchronize(self) -> None:
        self.run_until(self._launched)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this the stream that libraries without a stream argument use."""
        _streams.append(self)
        try:
            yield
        finally:
            _streams.pop()


_streams = [Stream()]


def current_stream() -> Stream:
    return _streams[-1]


# Memory.


def garbage_(tensor: Tensor) -> Tensor:
    """Fill with what uninitialised memory may hold at worst: NaN, or absurd integers."""
    if tensor.is_floating_point():
        return tensor.fill_(float("nan"))
    return tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max // 2 - 7)


def garbage(*shape: int, dtype: torch.dtype) -> Tensor:
    return garbage_(torch.empty(shape, dtype=dtype))


class Pointer:
    """The address of a tensor without a share in its life."""

    def __init__(self, tensor: Tensor, name: str) -> None:
        self.name, self.dtype, self.shape = name, tensor.dtype, tensor.shape
        self._stride, self._offset = tensor.stride(), tensor.storage_offset()
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._before: Tensor | None = None

    def get(self) -> Tensor:
        if self._storage.expired():
            raise UseAfterFree(f"{self.name}: the tensor died before the library was done with it")
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        return torch.empty(0, dtype=self.dtype).set_(storage, self._offset, self.shape, self._stride)

    def remember(self) -> Pointer:
        """Of an input: `check` will compare with what it holds now."""
        self._before = self.get().clone()
        return self

    def check(self) -> None:
        now = self.get()
        if self._before is not None and not _same_bits(now, self._before):
            raise InputChanged(f"{self.name}: written before the library had read it")


class Input:
    """An input that the library keeps alive itself; `get` finds changes since the call."""

    def __init__(self, tensor: Tensor, name: str) -> None:
        self._tensor, self._before, self._name = tensor, tensor.detach().clone(), name

    def check(self) -> None:
        if not _same_bits(self._tensor, self._before):
            raise InputChanged(f"{self._name}: written before the library had read it")

    def get(self) -> Tensor:
        return self._tensor.detach()


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


# Agreement.


def together(
    group: dist.ProcessGroup,
    call: Sequence[Any],
    data: Any = None,
    *,
    check: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Collective: return everybody's `data`.

    Raises:
        ContractError: On every rank, if `check` raised on one, or if the ranks are in different calls.
    """
    error = None
    try:
        check()
    except ContractError as mine:
        error = mine
    heard: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(heard, (tuple(call), data if error is None else None, error), group=group)
    for rank, (_, _, found) in enumerate(heard):
        if found is not None:
            raise type(found)(f"rank {rank}: {found}")
    calls = [their_call for their_call, _, _ in heard]
    require(all(c == calls[0] for c in calls), f"ranks are in different calls: {calls}", Disagreement)
    return [their_data for _, their_data, _ in heard]


# Rows.


@dataclass(frozen=True)
class Row:
    """One row of an expert-major buffer: `slot` holds route `k` of token `token` of rank `source`."""

    slot: int
    source: int
    token: int
    k: int


@dataclass(frozen=True)
class Placement:
    """Rows of one destination rank, before anything is dropped.

    Attributes:
        rows: In the order of slots.
        counts: Rows per local expert.
        begins: First slot of each zone.
        ends: One past the last slot of each zone, padding included.
    """

    rows: list[Row]
    counts: list[int]
    begins: list[int]
    ends: list[int]

    @property
    def needed(self) -> int:
        return self.ends[-1]

    def pads(self) -> list[int]:
        """Slots between a zone's rows and its aligned end."""
        zones = zip(self.begins, self.counts, self.ends)
        return [slot for begin, count, end in zones for slot in range(begin + count, end)]


def place(
    ids_of_rank: Sequence[Tensor],
    *,
    rank: int,
    num_local: int,
    alignment: int,
    shuffle: random.Random | None = None,
) -> Placement:
    """Expert by expert; inside an expert by source rank, token and k, or in any order with `shuffle`.

    Args:
        ids_of_rank: `[T, K]` global expert ids of each rank, -1 for no route.
        rank: The destination.
        num_local: L.
        alignment: Zones end at multiples of it; an expert without rows has an empty zone.
        shuffle: Source of disorder.
    """
    rows, counts, begins, ends, begin = [], [], [], [], 0
    for expert in range(rank * num_local, (rank + 1) * num_local):
        routes = [
            (source, token, k)
            for source, ids in enumerate(ids_of_rank)
            for token, k in (ids == expert).nonzero().tolist()
        ]
        if shuffle is not None:
            shuffle.shuffle(routes)
        rows += [Row(begin + i, *route) for i, route in enumerate(routes)]
        counts.append(len(routes))
        begins.append(begin)
        begin = -(-(begin + len(routes)) // alignment) * alignment
        ends.append(begin)
    return Placement(rows, counts, begins, ends)


def fill(out: Tensor, rows: Sequence[Row], of_rank: Sequence[Tensor], *, by_route: bool = False) -> None:
    """Write each row's token (`of_rank[source][token]`), or its route's number (`[token, k]`), to its slot."""
    for row in rows:
        source = of_rank[row.source]
        out[row.slot] = source[row.token, row.k] if by_route else source[row.token]


def send_back(
    group: dist.ProcessGroup,
    call: Sequence[Any],
    rows: Sequence[Row],
    tokens: Callable[[], Tensor],
    weights: Callable[[], Tensor] | None = None,
    *,
    check: Callable[[], None] = lambda: None,
) -> list[tuple[Row, Tensor, float]]:
    """Collective: return this rank's routes with their rows from all experts, weights 0 where there are none."""

    def pack() -> Any:
        index = torch.tensor([row.slot for row in rows], dtype=torch.int64)
        numbers = [0.0] * len(rows) if weights is None else weights()[index].tolist()
        return list(rows), tokens()[index].clone(), numbers

    packed: list[Any] = []

    def check_and_pack() -> None:
        check()
        packed.append(pack())

    heard = together(group, call, None, check=check_and_pack)
    heard = together(group, call, packed[0])
    me = dist.get_rank(group)
    return [
        (row, vector, number)
        for their_rows, vectors, numbers in heard
        for row, vector, number in zip(their_rows, vectors, numbers)
        if row.source == me
    ]


def sum_rows(out_TH: Tensor, routes: Sequence[tuple[Row, Tensor, float]]) -> None:
    """Write the sum over each token's routes, in fp32, rounded once; zero for a token without."""
    total = torch.zeros(out_TH.shape, dtype=torch.float32)
    for row, vector, _ in routes:
        total[row.token] += vector.float()
    out_TH.copy_(total)
