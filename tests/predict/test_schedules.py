"""Schedules: their lists are what the code does, no schedule beats its bound, and hiding never costs time."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from sidestream.measure.overlap import Bench
from sidestream.measure.overlap_pass import REST
from sidestream.measure.overlap_work import UnitWork, unit_input
from sidestream.overlap.chunked import ChunkedOverlap
from sidestream.overlap.none import NoOverlap
from sidestream.overlap.shared_expert import SharedExpertOverlap
from sidestream.overlap.shortcut import ShortcutOverlap
from sidestream.overlap.slots import best_slot
from sidestream.overlap.two_batch import TwoBatchOverlap
from sidestream.predict.layer import Seconds
from sidestream.predict.schedules import STEPS, Both, Schedule, Unit, backward_events, events, passes
from tests.core.build_tiny import SHAPE, Setup, local_batch, make_model
from tests.rank_pool import ranks

REAL: dict[str, Any] = {
    "none": (NoOverlap, Schedule("none")),
    "shared_expert": (SharedExpertOverlap, Schedule("shared_expert")),
    "chunked": (partial(ChunkedOverlap, num_chunks=3), Schedule("chunked", parts=3)),
    "two_batch": (TwoBatchOverlap, Schedule("two_batch", parts=2)),
    "pos1": (partial(ShortcutOverlap, tap="pos1", slot=1), Schedule("shortcut", tap="pos1", slot=1)),
    "pos2": (partial(ShortcutOverlap, tap="pos2", slot=2), Schedule("shortcut", tap="pos2", slot=2)),
    "pos3": (partial(ShortcutOverlap, tap="pos3", slot=0), Schedule("shortcut", tap="pos3", slot=0)),
}
MOVED = ("dispatch", "combine", "dispatch.backward", "combine.backward")


def walked(rank: int, world: int, name: str) -> list[list[tuple[str, str]]]:
    """What a serial unit does, forward and backward."""
    setup = Setup(
        ep=2, dispatcher="nccl_ep", schedule=REAL[name][0], shape=replace(SHAPE, num_shared_experts=1)
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


def some_schedule(draw: random.Random) -> Schedule:
    name = draw.choice(["none", "shared_expert", "chunked", "two_batch", "shortcut"])
    return Schedule(
        name=name,
        parts=draw.randrange(2, 5) if name == "chunked" else 2 if name == "two_batch" else 1,
        tap=draw.choice(["pos1", "pos2", "pos3"]),
        delay_wgrad=draw.random() < 0.5,
        double_gating=name == "shortcut" and draw.random() < 0.3,
    )


@pytest.mark.parametrize("name", REAL)
def test_a_list_is_what_the_schedule_does(name: str) -> None:
    unit = some_unit(random.Random(0))
    forward, backward = ranks(2).run(partial(walked, name=name))[0]
    listed = [events(unit, REAL[name][1])[0], backward_events(unit, REAL[name][1])[0]]
    for real, ours in zip((forward, backward), listed):
        assert told([(event.kind, event.name) for event in ours]) == told(real)


def test_a_schedule_neither_beats_compute_nor_communication_nor_loses_to_waiting() -> None:
    draw = random.Random(1)
    for _ in range(1000):
        unit, schedule = some_unit(draw), some_schedule(draw)
        for one in passes(unit, schedule, wire_on_compute=draw.choice([0.0, 0.2])):
            assert one.seconds >= max(one.compute, one.communication) - 1e-9
            assert one.seconds <= one.serial + 1e-9
            assert one.serial == pytest.approx(one.compute + one.communication)
            assert -1e-9 <= one.e_hide <= 1 + 1e-9


def test_every_part_is_in_every_schedule_once() -> None:
    """Whatever the order, the work is the same: none does less."""
    draw = random.Random(2)
    for _ in range(200):
        unit = some_unit(draw)
        plain = [one.compute for one in passes(unit, Schedule("none"))]
        for schedule in (Schedule("shared_expert"), Schedule("chunked", parts=3), Schedule("two_batch", parts=2),
                         Schedule("shortcut", tap="pos1")):  # fmt: skip
            assert [one.compute for one in passes(unit, schedule)] == pytest.approx(plain)
        late = [one.compute for one in passes(unit, Schedule("chunked", parts=3, delay_wgrad=True))]
        assert late == pytest.approx(plain)


def test_bounds_by_hand() -> None:
    nothing = dict.fromkeys(("route", "counts", "pack", "unpack", "late", "gather", "add"), 0.0)
    moe = Seconds(dispatch=4.0, combine=3.0, experts=2.0, fixed=(0.0, 0.0), **nothing)
    unit = Unit(attention=Both(5.0, 5.0), shared=Both(3.0, 3.0), moe=(moe, moe))
    # attention 5, dispatch 4, experts 2, combine 3, shared 3
    found = {
        "none": (Schedule("none"), 17.0),
        "shared_expert": (Schedule("shared_expert"), 5 + max(2.0, 4.0) + 2 + max(1.0, 3.0)),
        # Dispatches end at 7 and 9; experts from 7 to 8 and from 9 to 10; combines from 9, when the wire is free, to
        # 10.5 and 12; the shared expert from 10 to 13.
        "chunked": (Schedule("chunked", parts=2), 13.0),
        # Attention to 2.5, dispatch to 4.5; attention to 5, dispatch to 7; experts 5 to 6 and 7 to 8; combines 7 to 8.5
        # and 8.5 to 10; both shared experts from 8 to 11.
        "two_batch": (Schedule("two_batch", parts=2), 11.0),
        "shortcut": (Schedule("shortcut", tap="pos1"), max(5.0, 4.0) + 2 + max(3.0, 3.0)),
        "interleaved": (Schedule("none", interleaved=1.0), 10.0),
    }
    for name, (schedule, seconds) in found.items():
        forward = passes(unit, schedule)[0]
        assert forward.seconds == pytest.approx(seconds), name
        assert forward.serial == pytest.approx(17.0), name
    half = passes(unit, Schedule("none", interleaved=0.5))[0]
    assert half.seconds == pytest.approx((17 + 10) / 2)


def test_the_slot_is_the_one_that_training_finds() -> None:
    """The search of `overlap.slots` and the predictor agree where a backward step takes twice its forward pass."""
    draw = random.Random(3)
    for _ in range(300):
        unit = some_unit(draw)
        work = dict.fromkeys(("route", "counts", "pack", "unpack", "experts", "late", "gather", "add"), 0.0)
        moe = tuple(replace(one, dispatch=1.0, combine=0.7, **work) for one in unit.moe)
        unit = replace(unit, moe=moe)
        of = {
            "attention_before": unit.before[0],
            "feed_forward": unit.before[1],
            "attention": unit.attention,
            "shared": unit.shared,
        }
        for tap, names in STEPS.items():
            slot = best_slot([of[name].forward for name in names], dispatch=1.0, combine=0.7)
            best = sum(one.seconds for one in passes(unit, Schedule("shortcut", tap=tap)))
            same = sum(one.seconds for one in passes(unit, Schedule("shortcut", tap=tap, slot=slot)))
            assert same == pytest.approx(best)


def test_hidden_transfers_take_their_share_of_the_cores() -> None:
    unit = some_unit(random.Random(4))
    free, taxed = (passes(unit, Schedule("shortcut"), wire_on_compute=tax) for tax in (0.0, 0.5))
    for one, two in zip(free, taxed):
        assert two.seconds == pytest.approx(one.seconds + 0.5 * (one.serial - one.seconds))
