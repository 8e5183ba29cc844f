"""`fusion.library=triton`: the layer as two persistent Triton kernels over memory that the ranks read directly.

    step n, on the stream of the caller          forward                          backward
    publish    when all announced n - 1          x, ids, weights                  x, dy
    announce   READY = n in every rank
    fetch, sort                                  every rank's routes              -
    one kernel                                   gather, GEMMs, DONE per tile,    gather, GEMMs, DONE per tile,
                                                 sum over k                       weight gradients, sum over k

Every rank fetches all ranks' routes and sorts them for itself: nothing is negotiated, and no size is read on the host,
so shapes are fixed (the budget, or the worst case) and a CUDA graph can hold all of it. The number of the step lives
on the device for the same reason.

Run under Triton's interpreter, on CPUs, and compiled for sm_90 and sm_100; it has never run on a GPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sidestream.dispatch.base import DispatchSpec, receive_budget
from sidestream.fusion.mega.symmetric import SymmetricMemory, open_memory
from sidestream.fusion.mega.window_layout import most_rows
from sidestream.fusion.mega.window_memory import PeerLost
from sidestream.fusion.mega.windows import timeout_of

_LINE = 128  # everything begins at a multiple
_RESERVED = 16  # multiprocessors that the persistent kernels leave to collectives on other streams
_BLOCK = 1024  # routes that a program fetches


@dataclass(frozen=True)
class MemoryLayout:
    """Byte offsets in a rank's memory.

    Attributes:
        ready: `[R]` int32, written by the others: steps they have announced.
        tokens: `[2, R]` int32, written by the others: tokens they announced, in odd and even steps.
        done: `[R, MT]` int32, written by the others: the last step in which a tile of theirs was finished.
        ids, weights: `[T, K]`, of even steps; of odd ones `routes_size` further on. All others read them.
        x, grad: `[T, H]`: rows of this rank's tokens, which the ranks of their experts read.
        rows, row_grads: `[S, H]`, `[S]`: results, which the ranks of the tokens read.
    """

    ready: int
    tokens: int
    done: int
    ids: int
    weights: int
    x: int
    grad: int
    rows: int
    row_grads: int
    size: int
    routes_size: int

    @staticmethod
    def of(spec: DispatchSpec, *, num_ranks: int, slots: int, max_tiles: int) -> MemoryLayout:
        row, routes = spec.hidden_size * spec.dtype.itemsize, spec.max_tokens * spec.top_k * 4
        tokens = spec.max_tokens * row
        sizes = 4 * num_ranks, 8 * num_ranks, 4 * num_ranks * max_tiles, routes, routes, routes, routes
        places = _places(*sizes, tokens, tokens, slots * row, slots * 4)
        ready, number, done, ids, weights, odd, _, x, grad, rows, row_grads, size = places
        return MemoryLayout(
            ready, number, done, ids, weights, x, grad, rows, row_grads, size, routes_size=odd - ids
        )


def _places(*sizes: int) -> list[int]:
    """Where pieces of these sizes begin, and where the last one ends."""
    places = [0]
    for size in sizes:
        places.append(places[-1] + -(-max(1, size) // _LINE) * _LINE)
    return places


@dataclass
class Route:
    """Where everything lies in one routing. All on the device.

    Attributes:
        num_tiles: `[1]`; of them the first so many of the next three hold.
        tile_expert, tile_begin, tile_end: `[MT]`: of this rank's tiles, the local expert and its slots.
        expert_begin, expert_end, expert_tiles: `[L]`: slots of the local experts without padding, number of tiles.
        src: `[S]`: the route of each slot, -1 for none.
        row_weights: `[S]` fp32.
        place, owner, tile: `[T, K]`: of this rank's routes, the slot (-1: none), its rank and its tile there.
        pulled: `[2]` int64: rows that came from other ranks to the local experts, and that come back to this one.
    """

    num_tiles: Tensor
    tile_expert: Tensor
    tile_begin: Tensor
    tile_end: Tensor
    expert_begin: Tensor
    expert_end: Tensor
    expert_tiles: Tensor
    src: Tensor
    row_weights: Tensor
    place: Tensor
    owner: Tensor
    tile: Tensor
    pulled: Tensor


class TritonLibrary:
    """See the module.

    Args:
        tiles: `triton_kernels.Tiles` to use instead of those chosen by the shapes; equal on all ranks.

    Attributes:
        budget: Slots of a rank; None: as many as can come, which takes memory whether they do or not.
    """

    name = "triton"
    transport = "symmetric_memory"
    budget: int | None = None
    # x again, too: as published for the backward it needs no place of its own while it waits.
    again: tuple[int, ...] = (0, 2, 3)
    fuses_shared = False

    def __init__(self, tiles: Any = None) -> None:
        self._tiles = tiles

    def wire(
        self, *, group: dist.ProcessGroup | None, spec: DispatchSpec, capacity_factor: float | None
    ) -> None:
        self.kernels = _kernels(spec)
        if group is not None and dist.get_world_size(group) == 1:
            group = None
        self.group, self.spec = group, spec
        self.num_ranks = 1 if group is None else dist.get_world_size(group)
        self.num_local = spec.num_experts // self.num_ranks
        rows_per_expert = spec.max_tokens * spec.top_k / self.num_local
        self.tiles = self._tiles or self.kernels.pick_tiles(
            rows_per_expert=rows_per_expert, itemsize=spec.dtype.itemsize
        )
        if capacity_factor is not None:
            self.budget = receive_budget(capacity_factor, spec, alignment=spec.alignment)
        self._moved = torch.zeros(
            2, dtype=torch.int64, device=spec.device
        )  # bytes; of these, the ones of no rows
        self._open()

    def _open(self) -> None:
        spec, device = self.spec, self.spec.device
        self.slots = most_rows(spec, num_ranks=self.num_ranks) if self.budget is None else self.budget
        self.max_tiles = -(-self.slots // self.tiles.m) + self.num_local
        self.layout = MemoryLayout.of(
            spec, num_ranks=self.num_ranks, slots=self.slots, max_tiles=self.max_tiles
        )
        timeout_s = 600.0 if self.group is None or device.type != "cpu" else timeout_of(self.group)
        self.memory: SymmetricMemory = open_memory(
            self.group, size=self.layout.size, device=device, timeout_s=timeout_s
        )
        self.rank = self.memory.rank
        self.step = torch.zeros(1, dtype=torch.int32, device=device)  # counted by the device
        self._counters = torch.zeros(
            1 + 3 * self.max_tiles + self.num_local, dtype=torch.int32, device=device
        )
        self._buffers: dict[str, Tensor] = {}

    def plan(self, *, layer: int, keep: bool, recompute: bool) -> TritonPlan:
        return TritonPlan(self, layer=layer, keep=keep, recompute=recompute)

    def resize(self, budget: int) -> None:
        self.memory.close()
        self.budget = -(-budget // 64) * 64
        self._open()

    def bytes_sent(self) -> int:
        return int(self._moved[0])

    def metadata_bytes_sent(self) -> int:
        return int(self._moved[1])

    def close(self) -> None:
        self.memory.close()
        self._buffers = {}

    # What plans use

    def buffer(self, name: str, rows: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory that lasts from step to step, `[rows, width]`. Steps follow each other on one stream."""
        kept = self._buffers.get(name)
        if kept is None or kept.numel() < rows * width:
            kept = torch.empty(rows * width, dtype=dtype or self.spec.dtype, device=self.spec.device)
            self._buffers[name] = kept
        return kept[: rows * width].view(rows, width)

    def counters(self) -> Tensor:
        """Zeros, for one kernel."""
        return self._counters.zero_()

    def programs(self) -> int:
        """How many programs a persistent kernel is started with."""
        if self.spec.device.type == "cpu":
            return 2  # one does all the work; the other finds none left
        count = torch.cuda.get_device_properties(self.spec.device).multi_processor_count
        return max(1, count - _RESERVED)

    def launch(self, kernel: str, grid: tuple[int, ...], *args: Any, **sizes: Any) -> None:
        """Run a kernel of `triton_kernels`."""
        getattr(self.kernels, kernel)[grid](*args, **sizes)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While kernels run: an error ends the waiting of the others, and theirs ends ours."""
        hooks = self.kernels.on_pause
        hooks.append(self.memory.look_after)
        try:
            yield
        except BaseException as error:
            self.memory.fail()
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, PeerLost):
                cause = cause.__cause__
            if cause is not None:
                raise cause from None  # not the interpreter's account of where it was
            raise
        finally:
            hooks.remove(self.memory.look_after)

    def count(self, rows: Tensor, metadata: Tensor | int) -> None:
        """Bytes that came to this rank."""
        row = self.spec.hidden_size * self.spec.dtype.itemsize
        self._moved[0] += rows * row + metadata
        self._moved[1] += metadata

    def sizes(self) -> dict[str, Any]:
        """What both large kernels are compiled for."""
        spec, at, tiles = self.spec, self.layout, self.tiles
        return {
            "R": self.num_ranks, "RP": _power(self.num_ranks), "H": spec.hidden_size, "K": spec.top_k,
            "TK": spec.max_tokens * spec.top_k, "MT": self.max_tiles, "ITEM": spec.dtype.itemsize,
            "READY": at.ready, "DONE": at.done, "X": at.x, "ROWS": at.rows,
            "PRECISION": "ieee" if spec.dtype == torch.float32 else "tf32",
            "BM": tiles.m, "BN": tiles.n, "BK": tiles.k, "BG": min(tiles.gather, _power(spec.hidden_size)),
            "BT": tiles.tokens, "GROUP": tiles.group, "num_warps": tiles.warps, "num_stages": tiles.stages,
        }  # fmt: skip

    def publish(self, x: Tensor, *, grad: Tensor | None, ids: Tensor | None, weights: Tensor | None) -> None:
        """Begin a step: make inputs readable, and say so."""
        spec, at, tokens = self.spec, self.layout, x.shape[0]
        self.step += 1
        blocks = max(1, -(-tokens // 16))
        self.launch(
            "publish", (blocks,), self.memory.bases, self.step, x, x if grad is None else grad,
            self.step if ids is None else ids, self.step if weights is None else weights, tokens, self.rank,
            R=self.num_ranks, RP=_power(self.num_ranks), H=spec.hidden_size, K=spec.top_k, KP=_power(spec.top_k),
            ITEM=spec.dtype.itemsize, READY=at.ready, X=at.x, GRAD=at.grad, IDS=at.ids, WEIGHTS=at.weights,
            ROUTES_SIZE=at.routes_size, WITH_IDS=ids is not None, WITH_GRAD=grad is not None, BT=16,
            BG=min(256, _power(spec.hidden_size)),
        )  # fmt: skip
        self.launch(
            "announce", (1,), self.memory.bases, self.step, tokens, self.rank,
            R=self.num_ranks, READY=at.ready, TOKENS=at.tokens,
        )  # fmt: skip

    def fetch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Every rank's ids `[R, TK]` (-1: no route), weights `[R, TK]`, tokens `[R]`."""
        spec, at, device = self.spec, self.layout, self.spec.device
        routes = spec.max_tokens * spec.top_k
        ids = torch.empty(self.num_ranks, routes, dtype=torch.int32, device=device)
        weights = torch.empty(self.num_ranks, routes, dtype=torch.float32, device=device)
        tokens = torch.empty(self.num_ranks, dtype=torch.int32, device=device)
        block = min(_BLOCK, _power(routes))
        self.launch(
            "fetch", (self.num_ranks, -(-routes // block)), self.memory.bases, self.step, ids, weights, tokens,
            self.rank, R=self.num_ranks, TK=routes, K=spec.top_k, READY=at.ready, TOKENS=at.tokens, IDS=at.ids,
            WEIGHTS=at.weights, ROUTES_SIZE=at.routes_size, B=block,
        )  # fmt: skip
        return ids, weights, tokens

    def sort(self, ids: Tensor, weights: Tensor, *, num_tokens: int) -> tuple[Route, Tensor, Tensor]:
        """Give every route of every rank its slot. No size is read on the host, every shape is fixed.

        Returns:
            The routing, and for this rank the slots it needs and the routes it drops (0-dim).
        """
        spec, device, rank = self.spec, self.spec.device, self.rank
        ranks, local, experts, slots = self.num_ranks, self.num_local, spec.num_experts, self.slots
        flat = ids.view(-1)
        total, routes = flat.numel(), ids.shape[1]
        number = torch.arange(total, device=device)
        # Few bits make a radix sort short; routes that do not exist go to the end.
        narrow = torch.int16 if experts < 2**15 else torch.int32
        keys, order = torch.sort(torch.where(flat < 0, experts, flat).to(narrow), stable=True)
        keys = keys.long()
        bounds = torch.searchsorted(keys, torch.arange(experts + 1, device=device))
        counts = (bounds[1:] - bounds[:-1]).view(ranks, local)
        padded = (counts + spec.alignment - 1) // spec.alignment * spec.alignment
        ends = padded.cumsum(1)
        starts = ends - padded
        needs = ends[:, -1]
        room = needs.clamp(max=slots)

        # Rows of each expert that fit, and their tiles, on every rank.
        held = torch.minimum(counts, (room.unsqueeze(1) - starts).clamp(min=0))
        num_tiles = (held + self.tiles.m - 1) // self.tiles.m
        last_tiles = num_tiles.cumsum(1)
        first_tiles = last_tiles - num_tiles

        # Of each route in sorted order.
        exists = keys < experts
        expert = keys.clamp(max=experts - 1)
        start, owner = starts.view(-1)[expert], expert // local
        in_expert = number - bounds[expert]
        slot = start + in_expert
        fits = exists & (slot < room[owner])
        mine = exists & (owner == rank)
        tile = first_tiles.view(-1)[expert] + in_expert // self.tiles.m

        # Of each slot. What has none goes behind the last one.
        src = torch.full((slots + 1,), -1, dtype=torch.int64, device=device)
        src.scatter_(0, torch.where(mine & fits, slot, slots), order)
        src = src[:slots]
        row_weights = torch.where(src >= 0, weights.view(-1)[src.clamp(min=0)], 0.0)

        # Of each route of this rank's tokens.
        where = torch.empty(2, total, dtype=torch.int64, device=device)
        where[0].scatter_(0, order, torch.where(fits, slot, -1))
        where[1].scatter_(0, order, tile)
        own = slice(rank * routes, rank * routes + num_tokens * spec.top_k)
        place, own_tile = where[0, own], where[1, own]
        own_owner = flat[own].clamp(min=0) // local

        tiles = torch.arange(self.max_tiles, device=device)
        tile_expert = torch.searchsorted(last_tiles[rank], tiles, right=True).clamp(max=local - 1)
        tile_begin = starts[rank][tile_expert] + (tiles - first_tiles[rank][tile_expert]) * self.tiles.m
        expert_end = starts[rank] + held[rank]
        came = (mine & fits & (order // routes != rank)).sum()
        come_back = ((place >= 0) & (own_owner != rank)).sum()
        route = Route(
            num_tiles=_int(last_tiles[rank, -1:]),
            tile_expert=_int(tile_expert),
            tile_begin=_int(tile_begin),
            tile_end=_int(expert_end[tile_expert]),
            expert_begin=_int(starts[rank]),
            expert_end=_int(expert_end),
            expert_tiles=_int(num_tiles[rank]),
            src=_int(src),
            row_weights=row_weights,
            place=_int(place),
            owner=_int(own_owner),
            tile=_int(own_tile),
            pulled=torch.stack([came, come_back]),
        )
        return route, needs[rank], (mine & ~fits).sum()


class TritonPlan:
    """One routing."""

    def __init__(self, library: TritonLibrary, *, layer: int, keep: bool, recompute: bool) -> None:
        self.library, self.layer, self.keep, self.recompute = library, layer, keep, recompute
        self.route: Route | None = None
        self.gate_up: Tensor | None = None

    @torch.no_grad()
    def forward(self, outs: list[Tensor], ins: list[Tensor]) -> None:
        """See `FusedPlan`."""
        with self.library.watching():
            self._forward(outs, ins)

    @torch.no_grad()
    def backward(self, outs: list[Tensor], ins: list[Tensor]) -> None:
        """See `FusedPlan`."""
        with self.library.watching():
            self._backward(outs, ins)

    def _forward(self, outs: list[Tensor], ins: list[Tensor]) -> None:
        lib, spec = self.library, self.library.spec
        (y, needed, dropped), (x, weights, w_gate_up, w_down, ids) = outs, [t.contiguous() for t in ins]
        width, num_tokens = w_down.shape[1], x.shape[0]
        _check_width(width, spec)
        lib.publish(x, grad=None, ids=ids, weights=weights)
        all_ids, all_weights, all_tokens = lib.fetch()
        route, needs, drops = lib.sort(all_ids, all_weights, num_tokens=num_tokens)
        needed[self.layer] = torch.maximum(needed[self.layer], needs)
        dropped[self.layer] += drops

        keeps = self.keep and not self.recompute
        self.gate_up = torch.empty(lib.slots, 2 * width, dtype=x.dtype, device=x.device) if keeps else None
        xg, act = lib.buffer("x", lib.slots, spec.hidden_size), lib.buffer("act", lib.slots, width)
        lib.launch(
            "forward", (lib.programs(),), lib.memory.bases, lib.step, lib.counters(), route.num_tiles,
            route.tile_expert, route.tile_begin, route.tile_end, route.src, route.row_weights, xg,
            act if self.gate_up is None else self.gate_up, act, w_gate_up, w_down, route.place, route.owner,
            route.tile, y, num_tokens, lib.rank, F=width, KEEP=keeps, **lib.sizes(),
        )  # fmt: skip
        lib.count(route.pulled.sum(), (all_tokens.sum() - num_tokens) * spec.top_k * 8)
        self.route = route if self.keep else None

    def _backward(self, outs: list[Tensor], ins: list[Tensor]) -> None:
        lib, spec, route = self.library, self.library.spec, self.route
        assert route is not None, "backward before forward"
        (dx, d_weights, dw_gate_up, dw_down), (dy, x, w_gate_up, w_down) = outs, [t.contiguous() for t in ins]
        at, slots, hidden, width = lib.layout, lib.slots, spec.hidden_size, w_down.shape[1]
        lib.publish(x, grad=dy, ids=None, weights=None)
        xg, dyg = lib.buffer("x", slots, hidden), lib.buffer("dy", slots, hidden)
        act, d_gate_up = lib.buffer("act", slots, width), lib.buffer("d_gate_up", slots, 2 * width)
        partial = lib.buffer("partial", -(-width // lib.tiles.n), slots, torch.float32)
        lib.launch(
            "backward", (lib.programs(),), lib.memory.bases, lib.step, lib.counters(), route.num_tiles,
            route.tile_expert, route.tile_begin, route.tile_end, route.expert_begin, route.expert_end,
            route.expert_tiles, route.src, route.row_weights, xg, dyg,
            act if self.gate_up is None else self.gate_up, act, d_gate_up, partial, w_gate_up, w_down, route.place,
            route.owner, route.tile, dx, d_weights, dw_gate_up, dw_down, x.shape[0], lib.rank, slots,
            L=lib.num_local, F=width, GRAD=at.grad, ROW_GRADS=at.row_grads, RECOMPUTE=self.gate_up is None,
            **lib.sizes(),
        )  # fmt: skip
        came, come_back = route.pulled
        lib.count(2 * came + come_back, come_back * 4)
        self.route = self.gate_up = None


def _kernels(spec: DispatchSpec) -> Any:
    """The module of kernels, if they can run for these sizes."""
    if importlib.util.find_spec("triton") is None:
        raise ValueError(
            "fusion.library=triton: triton is not installed; pip install triton, or set fusion=grouped"
        )
    from sidestream.fusion.mega import triton_kernels

    if spec.device.type != "cuda" and not (spec.device.type == "cpu" and triton_kernels.INTERPRET):
        raise ValueError(
            f"fusion.library=triton: it needs CUDA devices, and the ranks are on {spec.device.type}; "
            f"set fusion.library=auto"
        )
    if spec.device.type == "cuda" and triton_kernels.INTERPRET:
        raise ValueError(
            "fusion.library=triton: TRITON_INTERPRET=1 is for CPUs; unset it, or set fusion.library=auto"
        )
    if spec.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"fusion.library=triton: it computes in bf16 or fp32, not {spec.dtype}; set fusion=grouped"
        )
    if spec.device.type == "cuda" and torch.cuda.get_device_capability(spec.device) < (9, 0):
        raise ValueError("fusion.library=triton: it is built for Hopper and later GPUs; set fusion=grouped")
    _check_width(spec.hidden_size, spec, name="model.hidden_size")
    return triton_kernels


def _check_width(width: int, spec: DispatchSpec, *, name: str = "the experts' width") -> None:
    """Rows begin at multiples of 16 bytes: kernels load that much at once."""
    if width * spec.dtype.itemsize % 16:
        raise ValueError(
            f"fusion.library=triton: {name} {width} is no multiple of {16 // spec.dtype.itemsize}; set fusion=grouped"
        )


def _power(n: int) -> int:
    """The next power of two."""
    return 1 << max(0, n - 1).bit_length()


def _int(values: Tensor) -> Tensor:
    return values.to(torch.int32).contiguous()
