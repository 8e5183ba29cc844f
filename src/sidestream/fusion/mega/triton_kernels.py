"""The kernels of `fusion.library=triton`. Interpreted and compiled ahead of time; never yet run on a GPU.

`forward` and `backward` are one persistent kernel each. Their work is a queue of items in the order of dependence:

    forward    gather(m)  ->  expand(m, n)               ->  project(m, n)        ->  reduce(tokens)
    backward   gather(m)  ->  activation gradient(m, n)  ->  rows' gradient(m, n) ->  reduce(tokens), weights' gradients

A program claims the next item with an atomic counter. Why this cannot deadlock, for any grid:

* An item waits for items of its own rank only if they come before it in the queue, so a running program has them. Of
  all claimed items the first never waits for its own rank. This holds whatever number of programs is resident, so the
  grid need not fit; it is one program per multiprocessor all the same, as more would only wait.
* `reduce` waits for tiles of other ranks. Those come from items that do not wait for another rank's kernel, only for
  its inputs (READY), which were announced before that kernel began.
* Under the interpreter programs run one after another: the first one claims every item in order.

Flags of other ranks (READY, DONE of each tile) are pushed into this rank's memory, so waiting costs no trip
over the link. They hold the number of the step, which only grows: nothing has to be reset.

Legend: T local tokens, K routes per token, H features, F expert width, R ranks, S slots, m tile of BM slots of one
expert, n tile of columns. A route is a number: rank * TK + token * K + k.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import triton
import triton.language as tl

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"
VARYING = ["num_tokens", "rank", "S"]  # not compiled for their values


@dataclass(frozen=True)
class Tiles:
    """Sizes of the pieces. Equal on all ranks: a rank waits for tiles that another one numbered.

    Attributes:
        m: Slots.
        n: Columns of a product.
        k: Depth of a step of a product.
        gather: Columns that are fetched at a time.
        tokens: Tokens of one item of the reduction.
        group: Tiles of slots that share the weights while these are in the cache.
        warps, stages: Triton's `num_warps` and `num_stages`.
    """

    m: int
    n: int
    k: int
    gather: int
    tokens: int
    group: int
    warps: int
    stages: int


INTERPRETED = Tiles(m=16, n=16, k=16, gather=32, tokens=16, group=2, warps=1, stages=1)

# What is worth trying on a GPU. Triton's autotuner cannot: it would repeat a kernel that talks to other ranks, and
# choose differently on each. To tune, time a layer for each of these on all ranks (`TritonLibrary(tiles=...)`).
SPACE: tuple[Tiles, ...] = tuple(
    Tiles(m=m, n=n, k=k, gather=256, tokens=8, group=8, warps=8, stages=stages)
    for m, n, k, stages in (
        (128, 128, 64, 3),
        (128, 128, 32, 4),
        (128, 64, 64, 4),
        (64, 128, 64, 4),
        (64, 64, 64, 4),
    )
)


def pick_tiles(*, rows_per_expert: float, itemsize: int) -> Tiles:
    """The sizes to use: a function of what all ranks know.

    Args:
        rows_per_expert: Mean load.
        itemsize: Bytes of an element.
    """
    if INTERPRET:
        return INTERPRETED
    if itemsize == 4:  # fp32 operands take twice the shared memory, and their products twice the registers
        return Tiles(m=64, n=64, k=32, gather=128, tokens=8, group=8, warps=4, stages=3)
    return SPACE[2] if rows_per_expert >= 64 else SPACE[4]


# Waiting

on_pause: list[Callable[[float], None]] = []  # called while the interpreter waits, with the seconds waited
_began = [0.0]


if INTERPRET:

    def _pause(polls):
        if int(polls) == 0:
            _began[0] = time.monotonic()
        time.sleep(0 if int(polls) < 5 else 1e-3)
        for call in on_pause:
            call(time.monotonic() - _began[0])

    def _fence():
        pass  # the interpreter's atomics are those of the processor, and Python takes locks all the time

    @triton.jit
    def _dot(a, b, acc, PRECISION: tl.constexpr):
        # It holds bf16 as 16-bit integers and multiplies those. In fp32 the products are exact, as on a GPU.
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")

else:

    @triton.jit
    def _pause(polls):
        # A rank that died must not hang the others for ever: after a quarter of an hour or more, an error.
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.gt.s32 p, $1, 1073741824; @p trap; nanosleep.u32 100; mov.u32 $0, 0; }",
            "=r,r",
            [polls],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def _fence():
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )

    @triton.jit
    def _dot(a, b, acc, PRECISION: tl.constexpr):
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _wait(flags, value, mask):
    """Until every flag is at least `value`; then what was written before the flags can be read."""
    behind = tl.max(tl.where(mask, value - tl.load(flags, mask=mask, other=0, volatile=True), 0), axis=0)
    polls = 0
    while behind > 0:
        _pause(polls)
        polls += 1
        behind = tl.max(tl.where(mask, value - tl.load(flags, mask=mask, other=0, volatile=True), 0), axis=0)
    _fence()
    tl.debug_barrier()


@triton.jit
def _wait_one(flag, value):
    """The same for one flag."""
    polls = 0
    while tl.load(flag, volatile=True) < value:
        _pause(polls)
        polls += 1
    _fence()
    tl.debug_barrier()


@triton.jit
def _finish(counter):
    """Count an item whose results are written; how many had been counted before."""
    tl.debug_barrier()  # all threads have stored
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")


@triton.jit
def _push(bases, offset, value, R: tl.constexpr):
    """Write a flag into every rank's memory, after everything that this program has seen written."""
    tl.debug_barrier()
    for rank in range(R):
        flag = (tl.load(bases + rank) + offset).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(flag, value, sem="release", scope="sys")


@triton.jit
def _flags(bases, rank, offset):
    return (tl.load(bases + rank) + offset).to(tl.pointer_type(tl.int32))


# Small kernels around the large ones


@triton.jit(do_not_specialize=VARYING)
def publish(
    bases, step_ptr, x, grad, ids, weights, num_tokens, rank,
    R: tl.constexpr, RP: tl.constexpr, H: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, ITEM: tl.constexpr,
    READY: tl.constexpr, X: tl.constexpr, GRAD: tl.constexpr, IDS: tl.constexpr, WEIGHTS: tl.constexpr,
    ROUTES_SIZE: tl.constexpr,
    WITH_IDS: tl.constexpr, WITH_GRAD: tl.constexpr, BT: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """Copy what the others read to where they do.

    Rows of the last step have been read: its kernel did not end before every tile with a token of this rank was done.
    Routes may not have been, by a rank that is late, so there is room for two steps of them. Those of the step before
    the last have: who has announced the last step has finished the one before.
    """
    step = tl.load(step_ptr)
    ranks = tl.arange(0, RP)
    _wait(_flags(bases, rank, READY) + ranks, step - 1, ranks < R)
    mine = tl.load(bases + rank)
    tokens = tl.program_id(0) * BT + tl.arange(0, BT)
    there = tokens < num_tokens
    rows = tokens.to(tl.int64)[:, None] * H
    to_x = (mine + X).to(x.dtype)
    to_grad = (mine + GRAD).to(x.dtype)
    for first in range(0, H, BG):
        cols = first + tl.arange(0, BG)
        mask = there[:, None] & (cols < H)[None, :]
        at = tl.multiple_of(to_x + rows + cols[None, :], (1, 16))
        tl.store(at, tl.load(x + rows + cols[None, :], mask=mask), mask=mask)
        if WITH_GRAD:
            at = tl.multiple_of(to_grad + rows + cols[None, :], (1, 16))
            tl.store(at, tl.load(grad + rows + cols[None, :], mask=mask), mask=mask)
    if WITH_IDS:
        k = tl.arange(0, KP)
        mask = there[:, None] & (k < K)[None, :]
        at = tokens[:, None] * K + k[None, :]
        routes = mine + (step & 1).to(tl.int64) * ROUTES_SIZE
        to_ids = (routes + IDS).to(tl.pointer_type(tl.int32))
        tl.store(to_ids + at, tl.load(ids + at, mask=mask).to(tl.int32), mask=mask)
        to_weights = (routes + WEIGHTS).to(tl.pointer_type(tl.float32))
        tl.store(to_weights + at, tl.load(weights + at, mask=mask), mask=mask)


@triton.jit(do_not_specialize=VARYING)
def announce(
    bases, step_ptr, num_tokens, rank, R: tl.constexpr, READY: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """Tell every rank that this one's inputs are there, and how many tokens. One program."""
    step = tl.load(step_ptr)
    _push(bases, TOKENS + ((step & 1) * R + rank) * 4, num_tokens, R)
    _push(bases, READY + rank * 4, step, R)


@triton.jit(do_not_specialize=VARYING)
def fetch(
    bases, step_ptr, all_ids, all_weights, all_tokens, rank,
    R: tl.constexpr, TK: tl.constexpr, K: tl.constexpr, READY: tl.constexpr, TOKENS: tl.constexpr,
    IDS: tl.constexpr, WEIGHTS: tl.constexpr, ROUTES_SIZE: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Wait for a rank's inputs and copy its routes. Program (rank, block); tokens that it lacks have no route."""
    step = tl.load(step_ptr)
    other = tl.program_id(0)
    _wait_one(_flags(bases, rank, READY) + other, step)
    tokens = tl.load(_flags(bases, rank, TOKENS) + (step & 1) * R + other, volatile=True)
    routes = tl.load(bases + other) + (step & 1).to(tl.int64) * ROUTES_SIZE
    at = tl.program_id(1) * B + tl.arange(0, B)
    there = at < tokens * K
    ids = tl.load((routes + IDS).to(tl.pointer_type(tl.int32)) + at, mask=there, other=-1)
    weights = tl.load((routes + WEIGHTS).to(tl.pointer_type(tl.float32)) + at, mask=there, other=0.0)
    tl.store(all_ids + other * TK + at, ids, mask=at < TK)
    tl.store(all_weights + other * TK + at, weights, mask=at < TK)
    if tl.program_id(1) == 0:
        tl.store(all_tokens + other, tokens)


# Pieces of the large kernels


@triton.jit
def _gather(
    bases, offset, src, to, rows, valid, first,
    H: tl.constexpr, TK: tl.constexpr, K: tl.constexpr, ITEM: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """Columns from `first` on of the tokens of these slots, from wherever they lie."""
    route = tl.load(src + rows, mask=valid, other=-1)
    there = route >= 0
    route = tl.where(there, route, 0)
    start = tl.load(bases + route // TK) + offset + ((route % TK) // K).to(tl.int64) * (H * ITEM)
    cols = first + tl.arange(0, BG)
    mask = there[:, None] & (cols < H)[None, :]
    # An address from a table is a number to the compiler; told that rows begin at 16 bytes, it loads so many at once.
    ptrs = tl.multiple_of(start.to(to.dtype)[:, None] + cols[None, :], (1, 16))
    values = tl.load(ptrs, mask=mask, other=0.0)
    tl.store(
        to + rows.to(tl.int64)[:, None] * H + cols[None, :], values, mask=valid[:, None] & (cols < H)[None, :]
    )


@triton.jit
def _product(
    acc, a, a_rows, a_valid, a_width, b, b_stride_k, b_stride_n, cols, cols_valid,
    DEPTH: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`acc + a[rows, :DEPTH] @ b[:DEPTH, cols]`; the strides say which way b lies."""
    left = a + a_rows.to(tl.int64)[:, None] * a_width
    right = b + cols.to(tl.int64)[None, :] * b_stride_n
    for first in range(0, DEPTH, BK):
        k = first + tl.arange(0, BK)
        inside = k < DEPTH
        x = tl.load(left + k[None, :], mask=a_valid[:, None] & inside[None, :], other=0.0)
        w = tl.load(right + k[:, None] * b_stride_k, mask=inside[:, None] & cols_valid[None, :], other=0.0)
        acc = _dot(x, w, acc, PRECISION)
    return acc


@triton.jit
def _gate_up(
    xg, rows, valid, w, cols, cols_valid,
    H: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`x @ w_gate` and `x @ w_up` of one expert, rounded as they are kept: a recomputation gives the same bits."""
    gate = tl.zeros((BM, BN), dtype=tl.float32)
    up = tl.zeros((BM, BN), dtype=tl.float32)
    left = xg + rows.to(tl.int64)[:, None] * H
    right = w + cols[None, :]
    for first in range(0, H, BK):
        k = first + tl.arange(0, BK)
        inside = k < H
        x = tl.load(left + k[None, :], mask=valid[:, None] & inside[None, :], other=0.0)
        at = right + k[:, None] * (2 * F)
        mask = inside[:, None] & cols_valid[None, :]
        gate = _dot(x, tl.load(at, mask=mask, other=0.0), gate, PRECISION)
        up = _dot(x, tl.load(at + F, mask=mask, other=0.0), up, PRECISION)
    kept = xg.dtype.element_ty
    return gate.to(kept).to(tl.float32), up.to(kept).to(tl.float32)


@triton.jit
def _reduce(
    bases, done, offset, place, owner, tile, out, tokens, there, first, step,
    H: tl.constexpr, K: tl.constexpr, MT: tl.constexpr, ITEM: tl.constexpr, BT: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """Sum the rows of each token over k, in this order and in fp32, each as soon as its tile is there."""
    cols = first + tl.arange(0, BG)
    acc = tl.zeros((BT, BG), dtype=tl.float32)
    for k in range(K):
        slot = tl.load(place + tokens * K + k, mask=there, other=-1)
        rank = tl.load(owner + tokens * K + k, mask=there, other=0)
        number = tl.load(tile + tokens * K + k, mask=there, other=0)
        exists = slot >= 0
        _wait(done + rank * MT + number, step, exists)
        start = tl.load(bases + rank) + offset + slot.to(tl.int64) * (H * ITEM)
        ptrs = tl.multiple_of(start.to(out.dtype)[:, None] + cols[None, :], (1, 16))
        rows = tl.load(ptrs, mask=exists[:, None] & (cols < H)[None, :], other=0.0)
        acc += rows.to(tl.float32)
    tl.store(
        out + tokens.to(tl.int64)[:, None] * H + cols[None, :],
        acc.to(out.dtype.element_ty),
        mask=there[:, None] & (cols < H)[None, :],
    )


# The large kernels


@triton.jit(do_not_specialize=VARYING)
def forward(
    bases, step_ptr, counters, num_tiles_ptr, tile_expert, tile_begin, tile_end, src, row_weights,
    xg, gate_up, act, w_gate_up, w_down, place, owner, tile, y, num_tokens, rank,
    R: tl.constexpr, RP: tl.constexpr, H: tl.constexpr, F: tl.constexpr, K: tl.constexpr, TK: tl.constexpr,
    MT: tl.constexpr, ITEM: tl.constexpr, READY: tl.constexpr, DONE: tl.constexpr, X: tl.constexpr,
    ROWS: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BG: tl.constexpr, BT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The layer. Counters, zeroed before: next item; then per tile: gathered, expanded, projected columns."""
    step = tl.load(step_ptr)
    mine = tl.load(bases + rank)
    ready = (mine + READY).to(tl.pointer_type(tl.int32))
    done = (mine + DONE).to(tl.pointer_type(tl.int32))
    result = (mine + ROWS).to(y.dtype)
    ranks = tl.arange(0, RP)
    num_tiles = tl.load(num_tiles_ptr)

    num_g = tl.cdiv(H, BG)
    num_a = tl.cdiv(F, BN)
    num_b = tl.cdiv(H, BN)
    # Block j gathers group j, expands group j - 1 and projects group j - 2: nobody waits for what was just begun.
    block = GROUP * (num_g + num_a + num_b)
    main = (tl.cdiv(num_tiles, GROUP) + 2) * block
    total = main + tl.cdiv(num_tokens, BT) * num_g
    item = tl.atomic_add(counters, 1, sem="relaxed", scope="gpu")
    while item < total:
        if item < main:
            j = item // block
            r = item % block
            if r < GROUP * num_g:
                m = j * GROUP + r % GROUP
                if m < num_tiles:
                    rows = tl.load(tile_begin + m) + tl.arange(0, BM)
                    valid = rows < tl.load(tile_end + m)
                    _wait(ready + ranks, step, ranks < R)
                    _gather(bases, X, src, xg, rows, valid, r // GROUP * BG, H, TK, K, ITEM, BG)
                    _finish(counters + 1 + m)
            elif r < GROUP * (num_g + num_a):
                r -= GROUP * num_g
                m = (j - 1) * GROUP + r % GROUP
                if (m >= 0) & (m < num_tiles):
                    rows = tl.load(tile_begin + m) + tl.arange(0, BM)
                    valid = rows < tl.load(tile_end + m)
                    expert = tl.load(tile_expert + m).to(tl.int64)
                    cols = r // GROUP * BN + tl.arange(0, BN)
                    inside = cols < F
                    _wait_one(counters + 1 + m, num_g)
                    w = w_gate_up + expert * (H * 2 * F)
                    gate, up = _gate_up(xg, rows, valid, w, cols, inside, H, F, BM, BN, BK, PRECISION)
                    mask = valid[:, None] & inside[None, :]
                    if KEEP:
                        at = gate_up + rows.to(tl.int64)[:, None] * (2 * F) + cols[None, :]
                        tl.store(at, gate.to(gate_up.dtype.element_ty), mask=mask)
                        tl.store(at + F, up.to(gate_up.dtype.element_ty), mask=mask)
                    weight = tl.load(row_weights + rows, mask=valid, other=0.0)
                    value = gate / (1.0 + tl.exp(-gate)) * up * weight[:, None]
                    at = act + rows.to(tl.int64)[:, None] * F + cols[None, :]
                    tl.store(at, value.to(act.dtype.element_ty), mask=mask)
                    _finish(counters + 1 + MT + m)
            else:
                r -= GROUP * (num_g + num_a)
                m = (j - 2) * GROUP + r % GROUP
                if (m >= 0) & (m < num_tiles):
                    rows = tl.load(tile_begin + m) + tl.arange(0, BM)
                    valid = rows < tl.load(tile_end + m)
                    expert = tl.load(tile_expert + m).to(tl.int64)
                    cols = r // GROUP * BN + tl.arange(0, BN)
                    inside = cols < H
                    _wait_one(counters + 1 + MT + m, num_a)
                    acc = tl.zeros((BM, BN), dtype=tl.float32)
                    w = w_down + expert * (F * H)
                    acc = _product(acc, act, rows, valid, F, w, H, 1, cols, inside, F, BK, PRECISION)
                    at = tl.multiple_of(result + rows.to(tl.int64)[:, None] * H + cols[None, :], (1, 16))
                    tl.store(at, acc.to(y.dtype.element_ty), mask=valid[:, None] & inside[None, :])
                    if _finish(counters + 1 + 2 * MT + m) == num_b - 1:
                        _push(bases, DONE + (rank * MT + m) * 4, step, R)
        else:
            r = item - main
            tokens = r // num_g * BT + tl.arange(0, BT)
            _reduce(
                bases, done, ROWS, place, owner, tile, y, tokens, tokens < num_tokens, r % num_g * BG, step,
                H, K, MT, ITEM, BT, BG,
            )  # fmt: skip
        item = tl.atomic_add(counters, 1, sem="relaxed", scope="gpu")


@triton.jit
def _activation_gradient(
    xg, dyg, gate_up, act, d_gate_up, partial, row_weights, w_gate_up, w_down, rows, valid, first, S,
    H: tl.constexpr, F: tl.constexpr, RECOMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A tile of the gradients of gate and up, the activation once more, and its share of the weights' gradients."""
    cols = first + tl.arange(0, BN)
    inside = cols < F
    mask = valid[:, None] & inside[None, :]
    if RECOMPUTE:
        gate, up = _gate_up(xg, rows, valid, w_gate_up, cols, inside, H, F, BM, BN, BK, PRECISION)
    else:
        at = gate_up + rows.to(tl.int64)[:, None] * (2 * F) + cols[None, :]
        gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(at + F, mask=mask, other=0.0).to(tl.float32)
    d_act = tl.zeros((BM, BN), dtype=tl.float32)
    d_act = _product(d_act, dyg, rows, valid, H, w_down, 1, H, cols, inside, H, BK, PRECISION)
    weight = tl.load(row_weights + rows, mask=valid, other=0.0)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    wide = rows.to(tl.int64)[:, None]
    tl.store(
        act + wide * F + cols[None, :], (silu * up * weight[:, None]).to(act.dtype.element_ty), mask=mask
    )
    tl.store(partial + first // BN * S + rows, tl.sum(d_act * silu * up, axis=1), mask=valid)
    d_act *= weight[:, None]
    d_gate = d_act * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    at = d_gate_up + wide * (2 * F) + cols[None, :]
    tl.store(at, d_gate.to(act.dtype.element_ty), mask=mask)
    tl.store(at + F, (d_act * silu).to(act.dtype.element_ty), mask=mask)


@triton.jit
def _weight_gradient(
    a, b, out, begin, end, a_width, b_width, first_row, first_col,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of `a^T @ b` over the slots of one expert; zero without any."""
    i = first_row + tl.arange(0, BM)
    j = first_col + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for first in range(begin, end, BK):
        rows = first + tl.arange(0, BK)
        valid = rows < end
        wide = rows.to(tl.int64)
        left = tl.load(
            a + wide[None, :] * a_width + i[:, None], mask=valid[None, :] & (i < a_width)[:, None], other=0.0
        )
        right = tl.load(
            b + wide[:, None] * b_width + j[None, :], mask=valid[:, None] & (j < b_width)[None, :], other=0.0
        )
        acc = _dot(left, right, acc, PRECISION)
    at = out + i.to(tl.int64)[:, None] * b_width + j[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(i < a_width)[:, None] & (j < b_width)[None, :])


@triton.jit(do_not_specialize=VARYING)
def backward(
    bases, step_ptr, counters, num_tiles_ptr, tile_expert, tile_begin, tile_end, expert_begin, expert_end,
    expert_tiles, src, row_weights, xg, dyg, gate_up, act, d_gate_up, partial, w_gate_up, w_down,
    place, owner, tile, dx, d_weights, dw_gate_up, dw_down, num_tokens, rank, S,
    R: tl.constexpr, RP: tl.constexpr, L: tl.constexpr, H: tl.constexpr, F: tl.constexpr, K: tl.constexpr,
    TK: tl.constexpr, MT: tl.constexpr, ITEM: tl.constexpr, READY: tl.constexpr, DONE: tl.constexpr,
    X: tl.constexpr, GRAD: tl.constexpr, ROWS: tl.constexpr, ROW_GRADS: tl.constexpr,
    RECOMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BG: tl.constexpr, BT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Its reverse. Counters as in `forward`, and per expert: tiles' columns whose activation gradient is there."""
    step = tl.load(step_ptr)
    mine = tl.load(bases + rank)
    ready = (mine + READY).to(tl.pointer_type(tl.int32))
    done = (mine + DONE).to(tl.pointer_type(tl.int32))
    result = (mine + ROWS).to(dx.dtype)
    row_grads = (mine + ROW_GRADS).to(tl.pointer_type(tl.float32))
    ranks = tl.arange(0, RP)
    num_tiles = tl.load(num_tiles_ptr)

    num_g = tl.cdiv(H, BG)
    num_a = tl.cdiv(F, BN)
    num_b = tl.cdiv(H, BN)
    block = GROUP * (num_g + num_a + num_b)
    main = (tl.cdiv(num_tiles, GROUP) + 2) * block
    # Weight gradients and sums in turn: no other rank waits for either, so while some programs fetch, others compute.
    num_down = tl.cdiv(F, BM) * num_b
    num_up = tl.cdiv(H, BM) * tl.cdiv(2 * F, BN)
    num_sums = tl.cdiv(num_tokens, BT) * num_g
    num_late = L * (num_down + num_up) + num_sums
    total = main + num_late
    item = tl.atomic_add(counters, 1, sem="relaxed", scope="gpu")
    while item < total:
        if item < main:
            j = item // block
            r = item % block
            if r < GROUP * num_g:
                m = j * GROUP + r % GROUP
                if m < num_tiles:
                    rows = tl.load(tile_begin + m) + tl.arange(0, BM)
                    valid = rows < tl.load(tile_end + m)
                    _wait(ready + ranks, step, ranks < R)
                    _gather(bases, X, src, xg, rows, valid, r // GROUP * BG, H, TK, K, ITEM, BG)
                    _gather(bases, GRAD, src, dyg, rows, valid, r // GROUP * BG, H, TK, K, ITEM, BG)
                    _finish(counters + 1 + m)
            elif r < GROUP * (num_g + num_a):
                r -= GROUP * num_g
                m = (j - 1) * GROUP + r % GROUP
                if (m >= 0) & (m < num_tiles):
                    rows = tl.load(tile_begin + m) + tl.arange(0, BM)
                    valid = rows < tl.load(tile_end + m)
                    expert = tl.load(tile_expert + m)
                    wide = expert.to(tl.int64)
                    _wait_one(counters + 1 + m, num_g)
                    _activation_gradient(
                        xg, dyg, gate_up, act, d_gate_up, partial, row_weights,
                        w_gate_up + wide * (H * 2 * F), w_down + wide * (F * H), rows, valid, r // GROUP * BN, S,
                        H, F, RECOMPUTE, PRECISION, BM, BN, BK,
                    )  # fmt: skip
                    _finish(counters + 1 + MT + m)
                    _finish(counters + 1 + 3 * MT + expert)
            else:
                r -= GROUP * (num_g + num_a)
                m = (j - 2) * GROUP + r % GROUP
                if (m >= 0) & (m < num_tiles):
                    rows = tl.load(tile_begin + m) + tl.arange(0, BM)
                    valid = rows < tl.load(tile_end + m)
                    expert = tl.load(tile_expert + m).to(tl.int64)
                    cols = r // GROUP * BN + tl.arange(0, BN)
                    inside = cols < H
                    _wait_one(counters + 1 + MT + m, num_a)
                    if r < GROUP:
                        weight_grad = tl.zeros((BM,), dtype=tl.float32)
                        for n in range(num_a):
                            weight_grad += tl.load(partial + n * S + rows, mask=valid, other=0.0)
                        tl.store(row_grads + rows, weight_grad, mask=valid)
                    acc = tl.zeros((BM, BN), dtype=tl.float32)
                    w = w_gate_up + expert * (H * 2 * F)
                    acc = _product(
                        acc, d_gate_up, rows, valid, 2 * F, w, 1, 2 * F, cols, inside, 2 * F, BK, PRECISION
                    )
                    at = tl.multiple_of(result + rows.to(tl.int64)[:, None] * H + cols[None, :], (1, 16))
                    tl.store(at, acc.to(dx.dtype.element_ty), mask=valid[:, None] & inside[None, :])
                    if _finish(counters + 1 + 2 * MT + m) == num_b - 1:
                        _push(bases, DONE + (rank * MT + m) * 4, step, R)
        else:
            late = (item - main).to(tl.int64)
            sums = (late * num_sums // num_late).to(tl.int32)
            if ((late + 1) * num_sums // num_late).to(tl.int32) > sums:
                tokens = sums // num_g * BT + tl.arange(0, BT)
                there = tokens < num_tokens
                _reduce(
                    bases, done, ROWS, place, owner, tile, dx, tokens, there, sums % num_g * BG, step,
                    H, K, MT, ITEM, BT, BG,
                )  # fmt: skip
                if sums % num_g == 0:
                    for k in range(K):
                        slot = tl.load(place + tokens * K + k, mask=there, other=-1)
                        other = tl.load(owner + tokens * K + k, mask=there, other=0)
                        start = tl.load(bases + other) + ROW_GRADS + slot.to(tl.int64) * 4
                        value = tl.load(start.to(tl.pointer_type(tl.float32)), mask=slot >= 0, other=0.0)
                        tl.store(d_weights + tokens * K + k, value, mask=there)
            else:
                r = item - main - sums
                expert = r // (num_down + num_up)
                r = r % (num_down + num_up)
                begin = tl.load(expert_begin + expert)
                end = tl.load(expert_end + expert)
                wide = expert.to(tl.int64)
                _wait_one(counters + 1 + 3 * MT + expert, tl.load(expert_tiles + expert) * num_a)
                if r < num_down:
                    _weight_gradient(
                        act, dyg, dw_down + wide * (F * H), begin, end, F, H, r // num_b * BM, r % num_b * BN,
                        BM, BN, BK, PRECISION,
                    )  # fmt: skip
                else:
                    r -= num_down
                    num_n = tl.cdiv(2 * F, BN)
                    _weight_gradient(
                        xg, d_gate_up, dw_gate_up + wide * (H * 2 * F), begin, end, H, 2 * F,
                        r // num_n * BM, r % num_n * BN, BM, BN, BK, PRECISION,
                    )  # fmt: skip
        item = tl.atomic_add(counters, 1, sem="relaxed", scope="gpu")
