"""`fusion.library=windows`: ranks of one host read each other's rows where they lie. No collective, nothing is packed.

    forward, step n                                   backward, step m
    x, ids, weights into my window; READY = n         dy into my window; READY = m
    wait for every rank's READY                       wait for every rank's READY
    order the routes that come to my experts
    for each expert, tile by tile:                    for each expert:
        rows    = gather(every window's x)                dy_rows = gather(every window's dy)
        gate_up = rows @ w_gate_up                        d_act   = dy_rows @ w_down^T
        act     = silu(gate) * up * weight                d_gate_up, d_weight, act
        rows of my window = act @ w_down                  dw_down = act^T @ dy_rows
    DONE = n                                              rows of my window = d_gate_up @ w_gate_up^T
    wait for every rank's DONE                            dw_gate_up = gather(x)^T @ d_gate_up
    y = sum over k of rows in every window            DONE = m; wait; dx = sum over k, d_weights = gather
    RELEASED = n                                      RELEASED = m

Three flags per rank instead of collectives. A window has two result areas, used in turn: step n may write when every
rank has RELEASED n - 2. x stays in the window, in a slot of its own, until the backward that gathers it again: that is
why nobody keeps gathered rows. A slot may be written again when every rank has released the last step that read it.

The sums are the owner's, in the order of K, in fp32: no atomic sum, the same bits every time.
"""

from __future__ import annotations

import heapq
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from sidestream.dispatch.base import DispatchSpec, receive_budget
from sidestream.dispatch.layout import rounds_half_up, sum_rows
from sidestream.fusion.base import activate, activate_backward
from sidestream.fusion.mega.window_layout import (
    DONE,
    MAX_SLOTS,
    NUM_FLAGS,
    READY,
    RELEASED,
    RING,
    Areas,
    put,
    segments,
    take,
    tiles,
)
from sidestream.fusion.mega.window_memory import Windows

TILE = 512  # rows of an expert that are carried through both products while they are in the cache


@dataclass(frozen=True)
class _Order:
    """The routes that come to this rank, expert-major.

    Attributes:
        ends: Ends of the experts' segments.
        rows: `[S]` where each slot's token lies, as a row over all windows; padding: the row of zeros.
        weights: `[S]` fp32.
        firsts: Row of the first token of each rank, over all windows.
        begin: Place of this rank's first route among those of all ranks.
        away: Slots whose token is another rank's.
    """

    ends: list[int]
    rows: Tensor
    weights: Tensor
    firsts: list[int]
    begin: int
    away: int


@dataclass(frozen=True)
class _Own:
    """Where the rows of this rank's own tokens lie.

    Attributes:
        index: `[T, K]` rows in the result areas of odd or even steps; -1: no row.
        complete: Every route has a row.
        places: `[T, K]` places in all windows' row gradients but for the beginning of the area; -1: no row.
        parity: Whether the step's number is even or odd.
        away: Rows of other ranks among them.
    """

    index: Tensor
    complete: bool
    places: Tensor
    parity: int
    away: int


class WindowsLibrary:
    """See the module. For CPUs.

    Attributes:
        budget: Rows of the result area that are used; None: as many as come.
    """

    name = "windows"
    transport = "shared_memory"
    budget: int | None = None
    again: tuple[int, ...] = (2, 3)
    fuses_shared = False

    def wire(
        self, *, group: dist.ProcessGroup | None, spec: DispatchSpec, capacity_factor: float | None
    ) -> None:
        if group is not None and dist.get_world_size(group) == 1:
            group = None
        ranks = 1 if group is None else dist.get_world_size(group)
        self.spec, self.num_ranks = spec, ranks
        self.num_local = spec.num_experts // ranks
        if capacity_factor is not None:
            self.budget = receive_budget(capacity_factor, spec, alignment=spec.alignment)
        self.areas = areas = Areas.of(spec, num_ranks=ranks)
        timeout_s = 600.0 if group is None else timeout_of(group)
        self.windows = windows = Windows(group, size=areas.size, num_flags=NUM_FLAGS, timeout_s=timeout_s)
        self.rank = windows.rank
        self.first = self.rank * self.num_local
        self.table = windows.tensor(spec.dtype).view(-1, spec.hidden_size)  # every row of every window
        self.floats = windows.tensor(torch.float32)
        self.ints = windows.tensor(torch.int32).numpy()
        self.step = 0
        self._free: list[int] = []
        self._num_slots = 0
        self._last_read: dict[int, int] = {}  # slot -> the last step in which it is read
        self._bytes = self._metadata_bytes = 0
        self._buffers: dict[str, Tensor] = {}

    def plan(self, *, layer: int, keep: bool, recompute: bool) -> WindowsPlan:
        return WindowsPlan(self, layer=layer, keep=keep, recompute=recompute)

    def resize(self, budget: int) -> None:
        self.budget = -(-budget // 64) * 64  # the addresses are there

    def bytes_sent(self) -> int:
        return self._bytes

    def metadata_bytes_sent(self) -> int:
        return self._metadata_bytes

    def close(self) -> None:
        for name in ("table", "floats", "ints"):
            delattr(self, name)
        self.windows.close()

    # Steps

    def begin(self) -> int:
        """Number of the next step; its result area is free."""
        self.step += 1
        for rank in range(self.num_ranks):
            self.windows.wait(rank, RELEASED, self.step - 2)
        return self.step

    def ready(self) -> None:
        """What the others read is there; wait for theirs."""
        self.windows.signal(READY, self.step)
        for rank in range(self.num_ranks):
            self.windows.wait(rank, READY, self.step)

    def done(self) -> None:
        """The rows are there; wait for those of the others."""
        self.windows.signal(DONE, self.step)
        for rank in range(self.num_ranks):
            self.windows.wait(rank, DONE, self.step)

    def release(self) -> None:
        """Nothing of others is read any more in this step."""
        self.windows.signal(RELEASED, self.step)

    def count(self, *, rows: int = 0, words: int = 0) -> None:
        """Rows and 32-bit words that were read in other ranks' windows."""
        self._bytes += rows * self.spec.hidden_size * self.spec.dtype.itemsize + 4 * words
        self._metadata_bytes += 4 * words

    # Places

    def area(self, rank: int) -> int:
        """Byte offset of the step's result area, over all windows."""
        return rank * self.areas.size + self.areas.area + (self.step % 2) * self.areas.area_size

    def rows_at(self, offset: int, count: int) -> Tensor:
        """`[count, H]` at a byte offset over all windows."""
        begin = offset // (self.spec.hidden_size * self.spec.dtype.itemsize)
        return self.table[begin : begin + count]

    def row_index(self, offset: int) -> int:
        """A byte offset as a row of the table."""
        return offset // (self.spec.hidden_size * self.spec.dtype.itemsize)

    def buffer(self, name: str, rows: int, width: int) -> Tensor:
        """Memory that lasts from step to step, `[rows, width]`."""
        kept = self._buffers.get(name)
        if kept is None or kept.numel() < rows * width:
            kept = self._buffers[name] = torch.empty(rows * width, dtype=self.spec.dtype)
        return kept[: rows * width].view(rows, width)

    # Slots

    def take_slot(self) -> int:
        """A slot for x that nobody reads any more: of the free ones the first, so that few are ever touched."""
        if not self._free:
            if self._num_slots == MAX_SLOTS:
                raise RuntimeError(f"fusion=mega: {MAX_SLOTS} forward passes wait for their backward")
            heapq.heappush(self._free, self._num_slots)
            self._num_slots += 1
        slot = heapq.heappop(self._free)
        for rank in range(self.num_ranks):
            self.windows.wait(rank, RELEASED, self._last_read.get(slot, 0))
        return slot

    def give_slot(self, slot: int, *, last_read: int) -> None:
        """Back to the free ones, once every rank has released a step."""
        self._last_read[slot] = last_read
        heapq.heappush(self._free, slot)

    def tokens_and_slot(self, rank: int) -> tuple[int, int]:
        """Tokens of a rank in this step, byte offset of its slot over all windows."""
        entry = 3 + 2 * (self.step % RING)
        windows, areas = self.windows, self.areas
        tokens, slot = windows.value(rank, entry), windows.value(rank, entry + 1)
        return tokens, rank * areas.size + areas.slot + slot * areas.slot_size

    def announce(self, tokens: int, slot: int) -> int:
        """Say where this step's tokens lie; the byte offset of the slot over all windows."""
        entry = 3 + 2 * (self.step % RING)
        self.windows.signal(entry, tokens)
        self.windows.signal(entry + 1, slot)
        return self.tokens_and_slot(self.rank)[1]


class WindowsPlan:
    """One routing in the windows."""

    def __init__(self, library: WindowsLibrary, *, layer: int, keep: bool, recompute: bool) -> None:
        self.library, self.layer, self.keep, self.recompute = library, layer, keep, recompute
        self._slot: list[tuple[int, int]] = []  # at most one, and the last step in which it is read
        self.order: _Order | None = None
        self.own: _Own | None = None
        self.gate_up: Tensor | None = None
        # A forward whose backward never comes gives its slot back when it is forgotten.
        weakref.finalize(self, _return, weakref.ref(library), self._slot).atexit = False

    @torch.no_grad()
    def forward(self, outs: list[Tensor], ins: list[Tensor]) -> None:
        """See `FusedPlan`."""
        try:
            self._forward(outs, ins)
        except BaseException:
            self.library.windows.fail()
            raise

    @torch.no_grad()
    def backward(self, outs: list[Tensor], ins: list[Tensor]) -> None:
        """See `FusedPlan`."""
        try:
            self._backward(outs, ins)
        except BaseException:
            self.library.windows.fail()
            raise

    def _forward(self, outs: list[Tensor], ins: list[Tensor]) -> None:
        lib = self.library
        (y, needed, dropped), (x, weights, w_gate_up, w_down, ids) = outs, ins
        self._forget()  # of an attempt whose backward never came
        lib.begin()
        slot = lib.take_slot()
        self._slot.append((slot, lib.step))
        at = lib.announce(x.shape[0], slot)
        lib.rows_at(at, x.shape[0]).copy_(x)
        own_ids = ids.reshape(-1).to(torch.int32).numpy()
        put(lib.ints, at + lib.areas.ids, own_ids)
        begin = (at + lib.areas.weights) // 4
        lib.floats[begin : begin + weights.numel()].copy_(weights.reshape(-1))
        lib.ready()

        self.order = order = self._sort(needed, dropped)
        slots, width = order.rows.numel(), w_gate_up.shape[2] // 2
        rows = lib.rows_at(lib.area(lib.rank) + lib.areas.rows, slots)
        self.gate_up = torch.empty(slots, 2 * width, dtype=x.dtype) if self._keeps else None
        for expert, begin, end in tiles(order.ends, TILE):
            part = slice(begin, end)
            tokens = lib.buffer("tokens", end - begin, x.shape[1])
            torch.index_select(lib.table, 0, order.rows[part], out=tokens)
            gate_up = (
                lib.buffer("gate_up", end - begin, 2 * width) if self.gate_up is None else self.gate_up[part]
            )
            torch.mm(tokens, w_gate_up[expert], out=gate_up)
            act = lib.buffer("act", end - begin, width)
            activate(gate_up, order.weights[part], out=act)
            torch.mm(act, w_down[expert], out=rows[part])
        lib.done()

        self.own = own = self._find_own(order, own_ids, top_k=ids.shape[1])
        y.copy_(self._combine(own, num_tokens=x.shape[0]))
        lib.count(rows=order.away + own.away, words=order.away)
        lib.release()
        if not self.keep:
            self._forget()

    @property
    def _keeps(self) -> bool:
        return self.keep and not self.recompute

    def _backward(self, outs: list[Tensor], ins: list[Tensor]) -> None:
        lib, order, own = self.library, self.order, self.own
        assert order is not None and own is not None, "backward before forward"
        (dx, d_weights, dw_gate_up, dw_down), (dy, w_gate_up, w_down) = outs, ins
        lib.begin()
        area = lib.area(lib.rank)
        lib.rows_at(area + lib.areas.grad, dy.shape[0]).copy_(dy)
        lib.ready()

        # dy lies in the windows as x does, but elsewhere.
        slots, hidden, width = order.rows.numel(), dy.shape[1], w_down.shape[1]
        grad_rows = self._rows_of_grad(order)
        rows = lib.rows_at(area + lib.areas.rows, slots)
        begin = (area + lib.areas.row_grads) // 4
        row_grads = lib.floats[begin : begin + slots]
        for expert, begin, end in segments(order.ends):
            if begin == end:
                dw_gate_up[expert].zero_()
                dw_down[expert].zero_()
                continue
            part, count = slice(begin, end), end - begin
            grad, tokens = lib.buffer("tokens", count, hidden), lib.buffer("grad", count, hidden)
            act, d_act = lib.buffer("act", count, width), lib.buffer("d_act", count, width)
            d_gate_up = lib.buffer("gate_up", count, 2 * width)
            torch.index_select(lib.table, 0, order.rows[part], out=tokens)
            torch.index_select(lib.table, 0, grad_rows[part], out=grad)
            torch.mm(grad, w_down[expert].t(), out=d_act)
            gate_up = tokens @ w_gate_up[expert] if self.gate_up is None else self.gate_up[part]
            activate_backward(
                gate_up,
                order.weights[part],
                d_act,
                grad_gate_up=d_gate_up,
                grad_weights=row_grads[part],
                out=act,
            )
            torch.mm(d_gate_up, w_gate_up[expert].t(), out=rows[part])
            torch.mm(act.t(), grad, out=dw_down[expert])
            torch.mm(tokens.t(), d_gate_up, out=dw_gate_up[expert])
        lib.done()

        dx.copy_(self._combine(own, num_tokens=dx.shape[0]))
        self._weight_gradient(own, d_weights)
        lib.count(rows=2 * order.away + own.away, words=own.away)
        lib.release()
        self._forget()

    def _sort(self, needed: Tensor, dropped: Tensor) -> _Order:
        """Order the routes that come to this rank, and say where each has gone."""
        lib, top_k = self.library, self.library.spec.top_k
        found = [lib.tokens_and_slot(rank) for rank in range(lib.num_ranks)]
        ids = np.concatenate([take(lib.ints, at + lib.areas.ids, tokens * top_k) for tokens, at in found])
        local = ids - lib.first
        routes = np.flatnonzero((local >= 0) & (local < lib.num_local))
        experts = local[routes].astype(np.int16)
        by_expert = np.argsort(experts, kind="stable")
        routes, experts = routes[by_expert], experts[by_expert]

        counts = np.bincount(experts, minlength=lib.num_local)
        align = lib.spec.alignment
        padded = -(-counts // align) * align
        ends = padded.cumsum()
        slots = np.arange(routes.size) + np.repeat((ends - padded) - (counts.cumsum() - counts), counts)
        room = int(ends[-1]) if lib.budget is None else min(lib.budget, int(ends[-1]))
        fits = slots < room
        needed[self.layer] = max(int(needed[self.layer]), int(ends[-1]))
        if not fits.all():
            dropped[self.layer] += int((~fits).sum())
            routes, slots, ends = routes[fits], slots[fits], ends.clip(max=room)

        # Where each route's token and weight lie.
        numbers = [np.arange(tokens * top_k) for tokens, _ in found]
        row_of = np.concatenate([lib.row_index(at) + n // top_k for (_, at), n in zip(found, numbers)])
        weight_of = np.concatenate([(at + lib.areas.weights) // 4 + n for (_, at), n in zip(found, numbers)])
        rows = np.full(room, lib.row_index(lib.areas.zero))
        places = np.full(room, lib.areas.zero // 4)
        rows[slots], places[slots] = row_of[routes], weight_of[routes]
        answer = np.full(ids.size, -1, dtype=np.int32)
        answer[routes] = slots
        put(lib.ints, lib.area(lib.rank) + lib.areas.places, answer)

        stride = lib.row_index(lib.areas.size)
        away = int(((rows // stride != lib.rank) & (rows != lib.row_index(lib.areas.zero))).sum())
        own_tokens, begin = found[lib.rank][0], top_k * sum(tokens for tokens, _ in found[: lib.rank])
        lib.count(words=ids.size - own_tokens * top_k)
        return _Order(
            ends=ends.tolist(),
            rows=torch.from_numpy(rows),
            weights=lib.floats.index_select(0, torch.from_numpy(places)),
            firsts=[lib.row_index(at) for _, at in found],
            begin=begin,
            away=away,
        )

    def _rows_of_grad(self, order: _Order) -> Tensor:
        """`[S]`: where each slot's row of dy lies."""
        lib, rows = self.library, order.rows.numpy()
        stride, zero = lib.row_index(lib.areas.size), lib.row_index(lib.areas.zero)
        begins = [lib.row_index(lib.area(rank) + lib.areas.grad) for rank in range(lib.num_ranks)]
        shift = np.array(begins) - np.array(order.firsts)
        return torch.from_numpy(np.where(rows == zero, zero, rows + shift[rows // stride]))

    def _find_own(self, order: _Order, ids: Any, *, top_k: int) -> _Own:
        """Look up where every rank has put the rows of this rank's tokens."""
        lib = self.library
        owner = ids // lib.num_local  # -1: none
        offsets = [lib.area(rank) + lib.areas.places + 4 * order.begin for rank in range(lib.num_ranks)]
        places = np.stack([take(lib.ints, offset, ids.size) for offset in offsets])
        slots = places[owner, np.arange(ids.size)]
        there = (ids >= 0) & (slots >= 0)
        owner = owner.astype(np.int64)
        rows = owner * lib.row_index(lib.areas.size) + slots + lib.row_index(lib.area(0) + lib.areas.rows)
        floats = np.where(there, owner * (lib.areas.size // 4) + slots, -1)
        lib.count(words=ids.size * (lib.num_ranks - 1))
        return _Own(
            index=torch.from_numpy(np.where(there, rows, -1).reshape(-1, top_k)),
            complete=bool(there.all()),
            places=torch.from_numpy(floats),
            parity=lib.step % 2,
            away=int((there & (owner != lib.rank)).sum()),
        )

    def _combine(self, own: _Own, *, num_tokens: int) -> Tensor:
        """`[T, H]`: the rows of each token in every window, summed over k."""
        lib, index = self.library, own.index
        if index.numel() == 0:
            return lib.table.new_zeros(num_tokens, lib.table.shape[1])
        if lib.step % 2 != own.parity:  # the other result area
            index = torch.where(
                index < 0, -1, index + lib.row_index(lib.areas.area_size) * (1 if lib.step % 2 else -1)
            )
        if rounds_half_up(lib.table):
            return sum_rows(lib.table, index, complete=own.complete)
        if not own.complete:
            index = torch.where(index < 0, lib.row_index(lib.areas.zero), index)
        return F.embedding_bag(index, lib.table, mode="sum")

    def _weight_gradient(self, own: _Own, out: Tensor) -> None:
        """`[T, K]`: what the experts' ranks found, zero without a route."""
        lib = self.library
        begin = (lib.area(0) + lib.areas.row_grads) // 4
        index = torch.where(own.places < 0, lib.areas.zero // 4, own.places + begin)
        torch.index_select(lib.floats, 0, index, out=out.view(-1))

    def _forget(self) -> None:
        """The plan's slot may be used again once every rank has released this step."""
        if self._slot:
            slot, _ = self._slot.pop()
            self.library.give_slot(slot, last_read=self.library.step)
        self.gate_up = self.order = self.own = None


def _return(library: Any, held: list[tuple[int, int]]) -> None:
    alive = library()
    if alive is not None and held:
        slot, step = held.pop()
        alive.give_slot(slot, last_read=step)


def timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds that a collective of the group may take."""
    backend: Any = group._get_backend(torch.device("cpu"))
    return float(backend.options._timeout.total_seconds())
