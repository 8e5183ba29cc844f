"""Measuring overlap on two ranks: sleeping parts on a throttled link, so that schedules and not cores are judged."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from sidestream import profiling
from sidestream.config.errors import ConfigError
from sidestream.exchange import link, ops
from sidestream.model.block import MoEUnit
from sidestream.model.moe import local
from sidestream.overlap import slots
from sidestream.overlap.base import Schedule
from sidestream.overlap.chunked import ChunkedOverlap
from sidestream.overlap.none import NoOverlap
from sidestream.overlap.shared_expert import SharedExpertOverlap
from sidestream.overlap.shortcut import ShortcutOverlap
from sidestream.overlap.two_batch import TwoBatchOverlap
from sidestream.profiling.bench import Bench, Measured
from sidestream.profiling.picture import draw, looks, timeline
from sidestream.profiling.spans import Bar
from sidestream.profiling.work import StepWork, UnitWork, unit_input
from tests.clock import virtual_time
from tests.conformance.broken import Copied, NeverSerial
from tests.core.build_tiny import SHAPE, Setup, local_batch, make_model, make_step, parallel_for
from tests.rank_pool import ranks

SCHEDULES: dict[str, Any] = {
    "shared_expert": SharedExpertOverlap,
    "chunked": ChunkedOverlap,
    "two_batch": TwoBatchOverlap,
    "shortcut": ShortcutOverlap,
}
# Seconds of a part in each pass.
LENGTHS = {"attention": 0.02, "experts": 0.02, "shared": 0.03}
OF_SCHEDULE = {
    "shared_expert": {"attention": 0.02, "experts": 0.02, "shared_up": 0.03, "shared_down": 0.03},
    "shortcut": {**LENGTHS, "feed_forward": 0.03, "attention_before": 0.0},
    # Called once per half.
    "two_batch": {name: seconds / 2 for name, seconds in LENGTHS.items()},
    "chunked": {**LENGTHS, "experts": 0.02},
}


def setup_for(name: str) -> Setup:
    schedule = SCHEDULES.get(name, NoOverlap)
    return Setup(ep=2, dispatcher="nccl_ep", gbps=1.0, schedule=schedule, shape=SHAPE)


def make_bench(setup: Setup, rank: int, world: int) -> Bench:
    model = make_model(setup).eval()
    unit, h, context = unit_input(model, local_batch(setup, 0, rank, world))
    return Bench(UnitWork(model, unit, h, context))


def reached(measured: Measured) -> float:
    """Of what the schedule can hide, the share that it did."""
    gain = sum(
        measured.median("serial", name) - measured.median("overlapped", name) for name in measured.passes
    )
    assert measured.hideable is not None
    return gain / sum(measured.hideable)


def traced(measured: Measured) -> float:
    """The same from the spans: what was computed while rows travelled, and was not in the serial run."""
    gain = measured.hidden_seconds("overlapped")[0] - measured.hidden_seconds("serial")[0]
    assert measured.hideable is not None
    return gain / sum(measured.hideable)


def asleep(rank: int, world: int, name: str, broken: bool = False) -> dict[str, float]:
    """Measure a schedule by a clock that only sleeping parts and the throttled link move on."""
    bench = make_bench(setup_for(name), rank, world)
    original = Schedule.path
    if broken:  # waits for every transfer where it starts: right numbers, and nothing hidden
        Schedule.path = lambda self, unit, routed, *, measured=False: original(  # type: ignore[method-assign]
            self, unit, routed, measured=True
        )
    try:
        with virtual_time(link, ops, profiling.bench, profiling.trace, slots):
            bench.record()
            bench.fall_asleep(OF_SCHEDULE[name], rounds=1)
            bench.choose_rate(0.4, rounds=1)
            bench.search_slot(parallel_for(world))
            measured = bench.measure(rounds=2, warmup=0)
        report = measured.report()
        found = [reached(measured), traced(measured), report.comm_share or 0.0, report.bound or 0.0]
        return dict(zip(("reached", "traced", "share", "bound"), found))
    finally:
        Schedule.path = original  # type: ignore[method-assign]
        bench.close()
        bench.work.model.parts.dispatcher.close()


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.sample(2)
def test_a_schedule_hides_what_it_can(name: str):
    for found in ranks(2).run(asleep, name=name):
        assert found["reached"] == pytest.approx(1.0, abs=1e-3), found
        assert found["traced"] > 0.9, found
        assert found["share"] == pytest.approx(0.4) and found["bound"] > 0.3, found


def test_a_wait_in_the_wrong_place_is_noticed():
    """The numbers stay right; times and spans show that nothing is hidden."""
    for found in ranks(2).run(asleep, name="shortcut", broken=True):
        assert found["reached"] == pytest.approx(0.0, abs=1e-3), found
        assert found["traced"] < 0.1, found
        assert found["bound"] > 0.3, found  # what the schedule could hide is not judged by what it did


# What is measured is the unit that trains.


class Keeping(UnitWork):
    """Keeps output and gradients of a run."""

    kept: list[torch.Tensor]

    def run(self, name: str) -> None:
        if name == "forward":
            super().run(name)
            assert self._output is not None
            self.kept = [self._output.detach()]
            return
        output, self._output = self._output, None
        assert output is not None
        wanted = [self._h, *self._params]
        gradients = torch.autograd.grad(output, wanted, self._gradient, allow_unused=True)
        self.kept += [local(g) for g in gradients if g is not None]


def arms_agree(rank: int, world: int, name: str, delay: bool, **changes: Any) -> list[str]:
    """Names of the ways in which output or gradients differ from those of the unit without hooks, or of each other."""
    make = partial(SCHEDULES[name], delay_wgrad=delay) if name in SCHEDULES else NoOverlap
    setup = setup_for(name).with_(schedule=make, gbps=None, **changes)
    model = make_model(setup).eval()
    unit, h, context = unit_input(model, local_batch(setup, 0, rank, world))
    work = Keeping(model, unit, h, context)
    for one in work.passes:
        work.run(one)
    bare = work.kept
    bench = Bench(work)
    bench.record()
    different = []
    bench.run("serial")
    first = work.kept
    # A marker sums up a norm's several uses of its input before they meet the residual stream: the last bit may differ.
    if not all((x - y).abs().max() <= 1e-5 * x.abs().max() for x, y in zip(bare, first, strict=True)):
        different.append("hooks")
    for arm in ("overlapped", "compute"):
        bench.run(arm)
        if not all(map(torch.equal, first, work.kept)):
            different.append(arm)
    sent = model.parts.dispatcher.bytes_sent()
    bench.run("compute")
    if model.parts.dispatcher.bytes_sent() != sent:
        different.append("bytes of compute")
    bench.run("communication")
    if bench._traces[0].parts or len(bench._traces[0].spans) + len(bench._traces[1].spans) != len(
        bench._exchanges
    ):
        different.append("communication")
    # With sleeping parts what comes out is what they computed, but for weights' gradients.
    bench.fall_asleep(dict.fromkeys(("attention", "experts"), 0.0), rounds=1)
    bench.run("overlapped")
    if not all(map(torch.equal, first[:2], work.kept[:2])):
        different.append("asleep")
    bench.close()
    left = [key for module in (unit, unit.moe, unit.moe.experts) for key in vars(module) if key in METHODS]
    model.parts.dispatcher.close()
    return different + left


METHODS = ("attention", "forward", "route", "shared", "shared_up", "shared_down", "late_weights")


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_all_ways_compute_the_same(name: str, delay: bool):
    assert ranks(2).run(arms_agree, name=name, delay=delay) == [[], []]


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "nccl_ep", "deep_ep"])
def test_all_ways_compute_the_same_with_every_kind_of_exchange(dispatcher: str):
    """Static buffers, whose tails nobody sent; a histogram; rows to all ranks."""
    changes = {"dispatcher": dispatcher, "capacity_factor": 2.0}
    assert ranks(2).run(arms_agree, name="shortcut", delay=False, **changes) == [[], []]


def step_of(rank: int, world: int) -> tuple[list[str], int, list[float | None]]:
    """A whole step with two micro-batches, serial and overlapped."""
    setup = setup_for("chunked").with_(accumulation=2, balance="none")
    model = make_model(setup)
    step = make_step(setup, model, world)
    bench = Bench(StepWork(step, local_batch(setup, 0, rank, world)))
    bench.record()
    bench.choose_rate(0.3, rounds=1)
    measured = bench.measure(rounds=1, warmup=0)
    report = measured.report("step")
    names = sorted({part.name for part in measured.traces["overlapped"][0].parts})
    units = sum(isinstance(block, MoEUnit) for block in model.blocks)
    bench.close()
    step.reduction.close()
    model.parts.dispatcher.close()
    return names, units, [report.bound, report.exposed]


@pytest.mark.full
def test_a_whole_step_can_be_measured():
    names, units, figures = ranks(2).run(step_of)[0]
    assert names == ["attention", "experts", "feed_forward", "router", "shared"]
    assert units == 2 and all(figure is not None for figure in figures)


# The picture.


def picture(bars: list[Bar]) -> dict[str, Any]:
    drawn = timeline([[bars]], passes=["forward"], seconds=[0.1])
    return {"title": ["title", "more"], "figures": "", "serial": drawn, "overlapped": drawn}


BARS = [
    Bar("compute", "attention", False, 0.0, 0.04),
    Bar("communication", "dispatch", False, 0.01, 0.05),
    Bar("communication", "dispatch.routes", False, 0.05, 0.051),
    Bar("compute", "experts", True, 0.05, 0.1),
]


def colors(bars: list[Bar]) -> list[tuple[str, float, float]]:
    """What is drawn in the serial panel: colour, left edge and width in ms; lanes' backgrounds left out."""
    from matplotlib.colors import to_hex

    axes = draw(picture(bars)).axes[0]
    found = [
        (to_hex(p.get_facecolor()).upper(), round(p.get_x(), 3), round(p.get_width(), 3))
        for p in axes.patches
    ]
    return sorted(entry for entry in found if entry[0] != "#F4F4F4")


def test_each_bar_is_a_recorded_span():
    everything = colors(BARS)
    assert everything == sorted(
        (looks(b.name)[0], 1e3 * b.begin, round(1e3 * (b.end - b.begin), 3)) for b in BARS
    )
    for gone in BARS:
        left = colors([bar for bar in BARS if bar is not gone])
        missing = [entry for entry in everything if entry not in left]
        assert [entry[0] for entry in missing] == [looks(gone.name)[0]] and len(left) == len(BARS) - 1


def test_passes_follow_one_another_on_one_axis():
    drawn = timeline([[BARS[:2], BARS[3:]]], passes=["forward", "backward"], seconds=[0.06, 0.1])
    assert drawn["ms"] == pytest.approx(160)
    (last,) = [bar for bar in drawn["ranks"][0] if bar["name"] == "experts"]
    assert (last["pass"], last["begin_ms"], last["end_ms"]) == ("backward", 110.0, 160.0)


def recorded(rank: int, world: int, schedule: Any) -> str:
    bench = make_bench(setup_for("none").with_(schedule=schedule), rank, world)
    try:
        bench.record()
        return ""
    except ConfigError as error:
        return str(error)
    finally:
        bench.close()


def test_a_serial_run_that_is_not_serial_is_not_measured() -> None:
    said = ranks(2).run(recorded, schedule=NeverSerial)
    assert said[0] == said[1]
    assert said[0].startswith(
        f"overlap={NeverSerial.__module__}.NeverSerial: with enabled=false it still overlaps: "
    )
    assert "set " not in said[0] and "remove serial=False where" in said[0]
    # Copied from the docs and changed, without a word about serial runs.
    assert ranks(2).run(recorded, schedule=Copied) == ["", ""]
