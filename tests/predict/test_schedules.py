"""Schedules: the recorded order is what the code does, no schedule beats its bound, and hiding never costs time."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch import Tensor

from sidestream.model.context import PLAIN
from sidestream.overlap.base import completed
from sidestream.overlap.chunked import ChunkedOverlap
from sidestream.overlap.none import NoOverlap
from sidestream.overlap.shared_expert import SharedExpertOverlap
from sidestream.overlap.shortcut import ShortcutOverlap
from sidestream.overlap.slots import best_slot
from sidestream.overlap.two_batch import TwoBatchOverlap
from sidestream.predict.layer import Seconds
from sidestream.predict.schedules import Both, Unit, Work, events, passes
from sidestream.profiling.bench import Bench
from sidestream.profiling.spans import REST
from sidestream.profiling.work import UnitWork, unit_input
from tests.core.build_tiny import SHAPE, Setup, local_batch, make_model
from tests.rank_pool import ranks

SCHEDULES: dict[str, Any] = {
    "none": NoOverlap,
    "shared_expert": SharedExpertOverlap,
    "chunked": partial(ChunkedOverlap, num_chunks=3),
    "two_batch": TwoBatchOverlap,
    "pos1": partial(ShortcutOverlap, tap="pos1", slot=1),
    "pos2": partial(ShortcutOverlap, tap="pos2", slot=2),
    "pos3": partial(ShortcutOverlap, tap="pos3", slot=0),
}
GATES = partial(ShortcutOverlap, double_gating=True)
MOVED = ("dispatch", "combine", "dispatch.backward", "combine.backward")


def walked(rank: int, world: int, name: str) -> list[list[tuple[str, str]]]:
    """What a serial unit does, forward and backward."""
    setup = Setup(
        ep=2, dispatcher="nccl_ep", schedule=SCHEDULES[name], shape=replace(SHAPE, num_shared_experts=1)
    )
    model = make_model(setup).eval()
    unit, h, context = unit_input(model, local_batch(setup, 0, rank, world))
    bench = Bench(UnitWork(model, unit, h, context))
    try:
        bench.record()
        bench.run("serial")
        return [[(event.kind, event.name) for event in trace.events()] for trace in bench._traces]
    finally:
        bench.close()
        model.parts.dispatcher.close()


def told(listed: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Without the exchanges of counts and routes, which belong to the dispatch behind them, and what is no part."""
    return [
        (kind, name) for kind, name in listed if (kind in ("part", "fence") and name != REST) or name in MOVED
    ]


def some_unit(draw: random.Random) -> Unit:
    def part() -> Both:
        forward = draw.random()
        return Both(forward, 2 * forward)

    def seconds(factor: float) -> Seconds:
        values = [draw.random() * factor for _ in range(7)]
        late = draw.random() * 0.4 * factor
        return Seconds(
            route=values[0] / 5,
            counts=0.0 if factor > 1 else values[0] / 20,
            pack=values[1] / 5,
            dispatch=draw.random() * 2,
            unpack=values[2] / 5,
            experts=values[3] + late,
            late=late if factor > 1 else 0.0,
            gather=values[4] / 5,
            combine=draw.random() * 2,
            add=values[5] / 5,
            fixed=(0.01, 0.01),
        )

    return Unit(attention=part(), shared=part(), moe=(seconds(1.0), seconds(2.0)), before=(part(), part()))


def work(schedule: Any, **rest: Any) -> Work:
    """In blocks of `SHAPE`, of 4 sequences of 6 tokens, which can be cut into 2, 3 and 4 chunks."""
    return Work(completed(schedule), SHAPE, sequences=4, seq_length=6, top_k=2, **rest)


def some_schedule(draw: random.Random) -> Any:
    name = draw.choice([*SCHEDULES, "gates"])
    if name == "none":
        return NoOverlap()
    options: dict[str, Any] = {"delay_wgrad": draw.random() < 0.5}
    if name == "chunked":
        options["num_chunks"] = draw.randrange(2, 5)
    if name.startswith("pos") or name == "gates":
        options["slot"] = "auto"
    return (GATES if name == "gates" else SCHEDULES[name])(**options)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_recorded_order_is_what_a_real_unit_does(name: str) -> None:
    schedule = SCHEDULES[name](enabled=False)
    recorded = work(schedule)
    (entries,) = recorded.orders(before=recorded.reads_before(1))
    unit = some_unit(random.Random(0))
    for real, backward in zip(ranks(2).run(partial(walked, name=name))[0], (False, True)):
        ours, _ = events(entries, unit, recorded, backward=backward)
        assert told([(event.kind, event.name) for event in ours]) == told(real)


def test_a_schedule_neither_beats_compute_nor_communication_nor_loses_to_waiting() -> None:
    draw = random.Random(1)
    for _ in range(300):
        unit, schedule = some_unit(draw), some_schedule(draw)
        tax = draw.choice([0.0, 0.2])
        for one in passes(unit, work(schedule), before=draw.random() < 0.5, wire_on_compute=tax):
            assert one.seconds >= max(one.compute, one.communication) - 1e-9
            assert one.seconds <= one.serial + 1e-9
            assert one.serial == pytest.approx(one.compute + one.communication)
            assert -1e-9 <= one.e_hide <= 1 + 1e-9


def test_every_part_is_in_every_schedule_once() -> None:
    """Whatever the order, the work is the same: none does less."""
    draw = random.Random(2)
    for _ in range(50):
        unit = some_unit(draw)
        plain = [one.compute for one in passes(unit, work(NoOverlap()))]
        late = ChunkedOverlap(num_chunks=3, delay_wgrad=True)
        for schedule in (*(make() for make in SCHEDULES.values()), late):
            assert [one.compute for one in passes(unit, work(schedule))] == pytest.approx(plain)


def test_bounds_by_hand() -> None:
    nothing = dict.fromkeys(("route", "counts", "pack", "unpack", "late", "gather", "add"), 0.0)
    moe = Seconds(dispatch=4.0, combine=3.0, experts=2.0, fixed=(0.0, 0.0), **nothing)
    unit = Unit(attention=Both(5.0, 5.0), shared=Both(3.0, 3.0), moe=(moe, moe))
    # attention 5, dispatch 4, experts 2, combine 3, shared 3
    found = {
        "none": (NoOverlap(), 17.0),
        "shared_expert": (SharedExpertOverlap(), 5 + max(2.0, 4.0) + 2 + max(1.0, 3.0)),
        # Dispatches end at 7 and 9; experts from 7 to 8 and from 9 to 10; combines from 9, when the wire is free, to
        # 10.5 and 12; the shared expert from 10 to 13.
        "chunked": (ChunkedOverlap(num_chunks=2), 13.0),
        # Attention to 2.5, dispatch to 4.5; attention to 5, dispatch to 7; experts 5 to 6 and 7 to 8; combines 7 to 8.5
        # and 8.5 to 10; both shared experts from 8 to 11.
        "two_batch": (TwoBatchOverlap(), 11.0),
        "shortcut": (ShortcutOverlap(tap="pos1"), max(5.0, 4.0) + 2 + max(3.0, 3.0)),
    }
    for name, (schedule, seconds) in found.items():
        forward = passes(unit, work(schedule))[0]
        assert forward.seconds == pytest.approx(seconds), name
        assert forward.serial == pytest.approx(17.0), name
    for share in (0.5, 1.0):
        beside = passes(unit, work(NoOverlap(), interleaved=share))[0]
        assert beside.seconds == pytest.approx(17 - share * 7)


def test_the_slot_is_the_one_that_training_finds() -> None:
    """The search of `overlap.slots` and the predictor agree where a backward step takes twice its forward pass."""
    draw = random.Random(3)
    searching, beside = {}, {}
    for tap in ("pos1", "pos2", "pos3"):
        searching[tap] = work(ShortcutOverlap(tap=tap))
        parts = [e.name for e in searching[tap].orders(before=tap != "pos1")[0] if e.kind == "part"]
        beside[tap] = [name for name in parts[parts.index("router") + 1 :] if name != "experts"]
    fixed = {
        (tap, slot): work(ShortcutOverlap(tap=tap, slot=slot))
        for tap, names in beside.items()
        for slot in range(len(names) + 1)
    }
    for _ in range(100):
        unit = some_unit(draw)
        nothing = dict.fromkeys(
            ("route", "counts", "pack", "unpack", "experts", "late", "gather", "add"), 0.0
        )
        moe = tuple(replace(one, dispatch=1.0, combine=0.7, **nothing) for one in unit.moe)
        unit = replace(unit, moe=moe)
        for tap, names in beside.items():
            slot = best_slot([unit.parts[name].forward for name in names], dispatch=1.0, combine=0.7)
            best, same = (
                sum(one.seconds for one in passes(unit, schedule, before=tap != "pos1"))
                for schedule in (searching[tap], fixed[tap, slot])
            )
            assert same == pytest.approx(best)


def test_hidden_transfers_take_their_share_of_the_cores() -> None:
    unit = some_unit(random.Random(4))
    free, taxed = (passes(unit, work(ShortcutOverlap()), wire_on_compute=tax) for tax in (0.0, 0.5))
    for one, two in zip(free, taxed):
        assert two.seconds == pytest.approx(one.seconds + 0.5 * (one.serial - one.seconds))


def by_hand(unit: Any, h: Tensor, *, late_wait: bool) -> Tensor:
    """A user's schedule: shared expert beside dispatch or, with the wait in front of it, beside nothing."""
    a = h + unit.attention(h, PLAIN)
    path = unit.moe.routed_path(unit.norm(a))
    path.start("dispatch")
    if not late_wait:
        path.finish("dispatch")
    shared = unit.moe.shared(unit.norm(a))
    if late_wait:
        path.finish("dispatch")
    path.run("experts")
    path.start("combine")
    return a + shared + path.finish("combine").view_as(a)


class Own:
    """As much as the protocol asks for."""

    name, enabled, changes_model = "own", True, False

    def __init__(self, run: Any) -> None:
        self.run = run

    def __call__(self, unit: Any, h: Tensor, context: Any) -> Tensor:
        return self.run(unit, h)


def test_a_users_schedule_is_priced_as_it_waits() -> None:
    unit = some_unit(random.Random(5))
    hides, waits = (passes(unit, work(Own(partial(by_hand, late_wait=late)))) for late in (True, False))
    for one, two, plain in zip(hides, waits, passes(unit, work(NoOverlap()))):
        assert one.seconds < two.seconds == two.serial == pytest.approx(plain.serial)
        # What lies beside a dispatch hides it, or is hidden.
        moe = unit.moe[one is hides[1]]
        shared = unit.shared.backward if one is hides[1] else unit.shared.forward
        assert two.seconds - one.seconds == pytest.approx(min(moe.dispatch, shared))


def never_waits(unit: Any, h: Tensor) -> Tensor:
    unit.moe.routed_path(h).start("dispatch")
    return h


def reads_values(unit: Any, h: Tensor) -> Tensor:
    return h if h.sum().item() > 0 else -h


def unknown(unit: Any, h: Tensor) -> Tensor:
    return unit.moe.gate_twice(h)


@pytest.mark.parametrize(
    ("run", "why"),
    [(never_waits, "dispatch has a start and no wait"), (reads_values, "meta"), (unknown, "gate_twice")],
)
def test_what_cannot_be_recorded_says_why(run: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        work(Own(run)).orders(before=False)
    assert "\n" not in str(caught.value)
