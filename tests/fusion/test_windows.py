"""`fusion.library=windows`: against a loop over experts, under delays, with ranks that die."""

from __future__ import annotations

import os
import random
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from sidestream.dispatch.base import DispatchSpec, Routing
from sidestream.exchange.link import NativeLink
from sidestream.fusion.mega import window_memory, windows
from sidestream.fusion.mega.fused import MegaExperts
from sidestream.fusion.mega.window_layout import most_rows
from sidestream.fusion.mega.windows import WindowsLibrary
from tests.fusion.cases import CASES, Layer, assert_close, expected, layer
from tests.rank_pool import ranks

# fp32: sums in another order. bf16: rows of 8 bits of mantissa, rounded after each product, sums of up to three.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@contextmanager
def wired(given: Layer, *, align: int | None = None, **options: Any) -> Any:
    dtype = given.x[0].dtype
    spec = DispatchSpec(
        num_experts=given.w_gate_up.shape[0],
        hidden_size=given.x[0].shape[1],
        alignment=align or (16 if dtype == torch.bfloat16 else 1),
        max_tokens=max(x.shape[0] for x in given.x),
        top_k=given.ids[0].shape[1],
        num_layers=3,
        dtype=dtype,
    )
    mega = MegaExperts(library="windows", **options)
    mega.wire(group=dist.group.WORLD, spec=spec, link=NativeLink())
    try:
        yield mega
    finally:
        mega.close()


class Pass:
    """A forward pass that has started, with leaves of its own."""

    def __init__(
        self, mega: MegaExperts, given: Layer, rank: int, *, number: int = 0, recompute: bool = False
    ) -> None:
        self.x = given.x[rank].clone().requires_grad_()
        self.weights = given.weights[rank].clone().requires_grad_()
        self.experts = [w.requires_grad_() for w in given.local(rank)]
        routing = Routing(given.ids[rank], self.weights)
        self.pending = mega.start(self.x, routing, self.experts, layer=number, recompute=recompute)
        self.dy = given.dy[rank]

    def finish(self) -> Pass:
        self.y = self.pending.wait()
        return self

    def backward(self) -> dict[str, Tensor]:
        self.y.backward(self.dy)
        leaves = {
            "x": self.x,
            "weights": self.weights,
            "w_gate_up": self.experts[0],
            "w_down": self.experts[1],
        }
        return {"y": self.y.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}  # type: ignore[dict-item]


def once(mega: MegaExperts, given: Layer, rank: int, **options: Any) -> dict[str, Tensor]:
    return Pass(mega, given, rank, **options).finish().backward()


@pytest.fixture(autouse=True)
def _no_file_stays() -> Any:
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").exists() else set()
    yield
    if Path("/dev/shm").exists():
        assert not {name for name in set(os.listdir("/dev/shm")) - before if "sidestream" in name}


def parity(rank: int, world: int, *, cases: list[str], dtype: torch.dtype) -> None:
    for case in cases:
        given = layer(case, world=world, dtype=dtype)
        with wired(given) as mega:
            for recompute in (False, True):
                found = once(mega, given, rank, recompute=recompute)
                assert_close(found, expected(given, rank), TOLERANCE[dtype])
                assert all(v.dtype == (torch.float32 if n == "weights" else dtype) for n, v in found.items())


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.full)])
def test_output_and_gradients_are_those_of_a_loop_over_experts(world: int) -> None:
    ranks(world).run(parity, cases=list(CASES), dtype=torch.float32)


@pytest.mark.parametrize("world", [2, pytest.param(1, marks=pytest.mark.full)])
def test_bf16(world: int) -> None:
    ranks(world).run(parity, cases=["uniform", "missing", "unequal"], dtype=torch.bfloat16)


def tiled(rank: int, world: int) -> None:
    """Segments longer than a tile, and padded to a multiple."""
    given = layer("skewed", world=world, tokens=90)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "TILE", 32)
        with wired(given, align=8) as mega:
            assert_close(once(mega, given, rank), expected(given, rank), 1e-5)


def test_segments_of_several_tiles_and_padding() -> None:
    ranks(2).run(tiled)


def poison_and_delay(patch: pytest.MonkeyPatch, draw: random.Random) -> None:
    """Whatever may be written again is NaN; every flag comes late."""
    begin, take_slot, signal = WindowsLibrary.begin, WindowsLibrary.take_slot, window_memory.Windows.signal

    def poisoned_begin(lib: WindowsLibrary) -> int:
        step = begin(lib)
        at = lib.area(lib.rank)
        lib.floats[at // 4 : (at + lib.areas.places) // 4] = float("nan")
        return step

    def poisoned_slot(lib: WindowsLibrary) -> int:
        slot = take_slot(lib)
        at = lib.rank * lib.areas.size + lib.areas.slot + slot * lib.areas.slot_size
        lib.floats[at // 4 : (at + lib.areas.ids) // 4] = float("nan")
        lib.floats[(at + lib.areas.weights) // 4 : (at + lib.areas.slot_size) // 4] = float("nan")
        return slot

    def late(self: window_memory.Windows, flag: int, value: int) -> None:
        if draw.random() < 0.3:
            time.sleep(draw.random() * 2e-3)
        signal(self, flag, value)

    patch.setattr(WindowsLibrary, "begin", poisoned_begin)
    patch.setattr(WindowsLibrary, "take_slot", poisoned_slot)
    patch.setattr(window_memory.Windows, "signal", late)


def in_flight(rank: int, world: int, *, repetitions: int) -> None:
    """Three layers forward, then their backwards, and a pass without gradient in between; always the same bits."""
    given = [
        layer(case, world=world, seed=seed) for seed, case in enumerate(("uniform", "missing", "skewed"))
    ]
    right = [expected(each, rank) for each in given]
    first: list[dict[str, Tensor]] = []
    with wired(given[0]) as mega, pytest.MonkeyPatch.context() as patch:
        poison_and_delay(patch, random.Random(rank))
        for _ in range(repetitions):
            passes = [Pass(mega, each, rank, number=n).finish() for n, each in enumerate(given)]
            with torch.no_grad():
                Pass(mega, given[1], rank).finish()
            found = [each.backward() for each in reversed(passes)][::-1]
            first = first or found
            for one, other in zip(found, first):
                assert all(torch.equal(one[name], other[name]) for name in one)
        assert mega.backend._num_slots <= 4  # type: ignore[attr-defined]
    for one, other in zip(first, right):
        assert_close(one, other, 1e-5)


@pytest.mark.parametrize(
    ("world", "repetitions"),
    [(2, 6), *(pytest.param(w, 100, marks=pytest.mark.full) for w in (1, 2, 4))],
)
def test_delays_change_no_bit_and_nothing_is_read_late(world: int, repetitions: int) -> None:
    ranks(world).run(in_flight, repetitions=repetitions)


def forgotten(rank: int, world: int) -> None:
    """Forward passes whose backward never comes give their slots back."""
    given = layer("uniform", world=world)
    with wired(given) as mega:
        for _ in range(5):
            Pass(mega, given, rank).finish()
        assert_close(once(mega, given, rank), expected(given, rank), 1e-5)
        assert mega.backend._num_slots <= 2  # type: ignore[attr-defined]


def test_a_forward_without_its_backward_gives_its_slot_back() -> None:
    ranks(2).run(forgotten)


def overflow(rank: int, world: int) -> tuple[int, int]:
    given = layer("skewed", world=world, tokens=100, experts=4, top_k=2)
    with wired(given) as exact:
        right = once(exact, given, rank)
        assert exact.needed() is None and exact.budget is None
    with wired(given, capacity_factor=1.0) as mega:
        assert mega.budget == 256
        once(mega, given, rank, number=1)
        needed, dropped = mega.needed(), mega.dropped()
        assert needed is not None and dropped is not None and needed[0] == 0 == dropped[0]
        counts = int(needed[1]), int(dropped[1])
        assert counts[1] == max(0, counts[0] - 256)
        mega.reset_needed()
        mega.resize(400)
        found = once(mega, given, rank)
        assert all(torch.equal(found[name], right[name]) for name in found)
        assert int(dropped.sum()) == 0
    return counts


def test_a_budget_that_is_too_small_says_so_and_one_that_has_grown_gives_the_same_bits() -> None:
    counts = ranks(2).run(overflow)
    assert sum(needed for needed, _ in counts) == 2 * 100 * 2
    assert sorted(dropped > 0 for _, dropped in counts) == [False, True]


def traffic(rank: int, world: int) -> tuple[int, int]:
    given = layer("uniform", world=world)
    with wired(given) as mega:
        once(mega, given, rank)
        return mega.bytes_sent(), mega.metadata_bytes_sent()


def test_bytes_are_the_rows_that_other_ranks_own() -> None:
    given = layer("uniform", world=2)
    away = sum(int((ids // 4 != rank).sum()) for rank, ids in enumerate(given.ids))
    row = 16 * 4
    measured = ranks(2).run(traffic)
    # Rows there and back, in both passes, and x once more for the weights' gradient.
    assert sum(all_ - metadata for all_, metadata in measured) == 5 * away * row
    assert ranks(1).run(traffic) == [(0, 0)]


# What goes wrong


def dies(rank: int, world: int) -> None:
    given = layer("uniform", world=world)
    with wired(given) as mega:
        once(mega, given, rank)
        if rank == 1:
            os._exit(1)
        once(mega, given, rank)


def test_a_dead_rank_ends_the_others_with_a_message() -> None:
    with pytest.raises(AssertionError, match="rank 1 of the expert-parallel group has ended"):
        ranks(2).run(dies)


def fails(rank: int, world: int) -> None:
    given = layer("uniform", world=world)
    with wired(given) as mega, pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(windows, "activate", lambda *a, **k: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                once(mega, given, rank)
        else:
            with pytest.raises(
                window_memory.PeerLost, match="rank 1 of the expert-parallel group has failed"
            ):
                once(mega, given, rank)


def test_a_rank_that_raises_ends_the_others_with_a_message() -> None:
    ranks(2).run(fails)


def never_comes(rank: int, world: int) -> None:
    shared = window_memory.Windows(dist.group.WORLD, size=window_memory.PAGE, num_flags=2, timeout_s=0.4)
    if rank == 0:
        with pytest.raises(window_memory.PeerLost, match=r"rank 1 .* did not answer within 0 s"):
            shared.wait(1, 0, 1)
    dist.barrier()
    shared.close()


def test_a_rank_that_does_not_come_ends_the_wait() -> None:
    ranks(2).run(never_comes)


def on_hosts(rank: int, world: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window_memory, "host", lambda: f"node{rank} boot")
        with pytest.raises(
            ValueError, match=r"several hosts .node0, node1. .*; set fusion=grouped dispatcher=alltoall"
        ):
            window_memory.Windows(dist.group.WORLD, size=window_memory.PAGE, num_flags=2, timeout_s=5)


def test_ranks_of_several_hosts_are_refused() -> None:
    ranks(2).run(on_hosts)


def named_files(rank: int, world: int, *, folder: str) -> None:
    """Systems without anonymous files."""
    import tempfile

    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(os, "memfd_create")
        patch.setattr(tempfile, "tempdir", folder)
        given = layer("uniform", world=world)
        with wired(given) as mega:
            dist.barrier()
            assert os.listdir(folder) == []
            assert_close(once(mega, given, rank), expected(given, rank), 1e-5)


def test_a_named_file_is_gone_as_soon_as_every_rank_has_it(tmp_path: Path) -> None:
    ranks(2).run(named_files, folder=str(tmp_path))


def test_a_gpu_is_refused() -> None:
    spec = DispatchSpec(num_experts=4, hidden_size=8, device=torch.device("cuda"))
    with pytest.raises(ValueError, match=r"fusion.library=windows: .* set fusion.library=auto"):
        MegaExperts(library="windows").wire(group=None, spec=spec, link=NativeLink())


def ties(rank: int, world: int) -> None:
    """Results of experts that are 256 and 1: their sum lies in the middle between two numbers of bf16."""
    given = layer("missing", world=world, dtype=torch.bfloat16, top_k=2)
    with wired(given) as mega:
        once(mega, given, rank)
        library = mega.backend
        first = library.row_index(library.area(rank) + library.areas.rows)
        library.table[first], library.table[first + 1] = 256.0, 1.0
        index = torch.tensor([[first, first + 1], [first, -1], [-1, -1]])
        own = windows._Own(index=index, complete=False, places=index, parity=library.step % 2, away=0)
        plan = library.plan(layer=0, keep=False, recompute=False)
        assert plan._combine(own, num_tokens=3)[:, 0].tolist() == [256.0, 256.0, 0.0]
        dist.barrier()


def test_sums_of_bf16_are_rounded_to_the_nearest_even_number() -> None:
    ranks(2).run(ties)


def test_a_window_has_room_for_the_worst_case() -> None:
    # 2 ranks of 3 tokens choose 2 of this rank's 4 experts each; every expert's segment is padded by up to 7 rows.
    spec = DispatchSpec(num_experts=8, hidden_size=4, max_tokens=3, top_k=2, alignment=8)
    assert most_rows(spec, num_ranks=2) == 2 * 3 * 2 + 4 * 7
