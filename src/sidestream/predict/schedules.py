"""A unit in the order of work of each schedule: the lists that `measure.overlap_bound` puts a time to.

A list is written in the order of the serial run, every wait behind its start; the bound moves waits to where a result
is first read. A test compares these lists with what the schedules of `sidestream.overlap` really do.

    none            attention  route  dispatch  experts  combine  shared
    shared_expert   attention  route  dispatch [up]  experts  combine [down]
    chunked         attention  route  n dispatches  n times (experts, combine)  shared
    two_batch       twice (attention, route, dispatch)  twice (experts, combine)  twice shared
    shortcut        route  dispatch [steps]  experts  combine [steps]       steps: see overlap/shortcut.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sidestream.measure.overlap_bound import Event, best_order, duration, mirror
from sidestream.predict.layer import Seconds

STEPS = {
    "pos1": ("attention", "shared"),
    "pos2": ("feed_forward", "attention", "shared"),
    "pos3": ("attention_before", "feed_forward", "attention", "shared"),
}


@dataclass(frozen=True)
class Both:
    """Seconds of a part forward and backward."""

    forward: float
    backward: float

    def __add__(self, other: Both) -> Both:
        return Both(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, factor: float) -> Both:
        return Both(self.forward * factor, self.backward * factor)

    @property
    def total(self) -> float:
        return self.forward + self.backward


NOTHING = Both(0.0, 0.0)


@dataclass(frozen=True)
class Unit:
    """What a unit consists of, in seconds.

    Attributes:
        attention, shared: Of the MoE block. `shared`: also its norm.
        own_wire: `moe` with the machine's own transport, where `moe` has an emulated link. None: the same.
        before: Attention and feed-forward of the dense block in front, where the unit runs it.
        moe: The routed path, forward and backward.
    """

    attention: Both
    shared: Both
    moe: tuple[Seconds, Seconds]
    before: tuple[Both, Both] = (NOTHING, NOTHING)
    own_wire: tuple[Seconds, Seconds] | None = None


@dataclass(frozen=True)
class Schedule:
    """An overlap option with what changes the order.

    Attributes:
        name: Of the option.
        parts: Chunks of `chunked`, halves of `two_batch`; 1 for the others.
        tap: Of `shortcut`: pos1, pos2 or pos3.
        slot: Of `shortcut`: steps before the experts; None: the best.
        double_gating: DGMoE: the experts also work on the current representation, behind the steps, with nothing to
            hide it; there is no shared expert.
        delay_wgrad: Weight gradients are work while the gradient of dispatch travels.
        enabled: False: the serial run.
        fused: Dispatch, experts and combine are one operation.
        interleaved: Share of the passes beside which one of another micro-batch runs, so that all compute may hide all
            transfers (Megatron-Core's `--overlap-moe-expert-parallel-comm`); 0: none. Training has no such schedule.
    """

    name: str
    parts: int = 1
    tap: str = "pos1"
    slot: int | None = None
    double_gating: bool = False
    delay_wgrad: bool = False
    enabled: bool = True
    fused: bool = False
    interleaved: float = 0.0


@dataclass(frozen=True)
class Pass:
    """One pass of a unit.

    Attributes:
        seconds: As scheduled.
        serial: Every transfer waited for where it starts.
        compute, communication: Either alone.
    """

    seconds: float
    serial: float
    compute: float
    communication: float

    @property
    def exposed(self) -> float:
        """Seconds in which nothing is computed."""
        return max(0.0, self.seconds - self.compute)

    @property
    def e_hide(self) -> float:
        """(serial - scheduled) / the shorter of compute and communication; 0 where nothing travels."""
        shorter = min(self.compute, self.communication)
        return (self.serial - self.seconds) / shorter if shorter > 0 else 0.0

    def __add__(self, other: Pass) -> Pass:
        return Pass(
            self.seconds + other.seconds,
            self.serial + other.serial,
            self.compute + other.compute,
            self.communication + other.communication,
        )


def passes(unit: Unit, schedule: Schedule, *, wire_on_compute: float = 0.0) -> tuple[Pass, Pass]:
    """Forward and backward of a unit.

    Args:
        wire_on_compute: Seconds that a transfer adds to the compute it hides behind, per second that it takes on the
            machine's own transport.
    """
    if schedule.name == "shortcut" and schedule.slot is None:
        slots = range(len(_steps(schedule)) + 1)
        found = [
            passes(unit, replace(schedule, slot=slot), wire_on_compute=wire_on_compute) for slot in slots
        ]
        return min(found, key=lambda both: both[0].seconds + both[1].seconds)
    one_by_one = replace(schedule, enabled=False)
    waiting = [duration(*events(unit, one_by_one)), duration(*backward_events(unit, one_by_one))]
    listed = events(unit, schedule), backward_events(unit, schedule)
    own = [travel for _, travel in listed]
    if unit.own_wire is not None:
        copied = replace(unit, moe=unit.own_wire)
        own = [events(copied, schedule)[1], backward_events(copied, schedule)[1]]
    forward, backward = (
        _timed(
            one,
            travel,
            schedule,
            serial,
            wire_on_compute * (sum(copying) / sum(travel) if sum(travel) else 0.0),
        )
        for (one, travel), copying, serial in zip(listed, own, waiting)
    )
    return forward, backward


def _timed(
    listed: list[Event], travel: Sequence[float], schedule: Schedule, serial: float, wire_on_compute: float
) -> Pass:
    compute = sum(event.seconds for event in listed)
    if not schedule.enabled or (schedule.name == "none" and not schedule.interleaved):
        return Pass(serial, serial, compute, sum(travel))
    best = duration(best_order(listed), travel)
    if schedule.interleaved:
        best = serial - schedule.interleaved * (serial - max(compute, sum(travel)))
    # What is hidden takes its share of the cores from what hides it; a schedule never does worse than waiting.
    scheduled = min(serial, best + wire_on_compute * (serial - best))
    return Pass(scheduled, serial, compute, sum(travel))


def events(unit: Unit, schedule: Schedule) -> tuple[list[Event], list[float]]:
    """The forward pass in serial order, and the seconds of its transfers."""
    made = _List(unit, schedule, backward=False)
    made.write()
    return made.events, made.travel


def backward_events(unit: Unit, schedule: Schedule) -> tuple[list[Event], list[float]]:
    """The backward pass: the forward pass read from its end, every start a wait."""
    made = _List(unit, schedule, backward=True)
    made.write()
    mirrored = [mirror(event) for event in reversed(made.events)]
    order = {number: place for place, number in enumerate(reversed(range(len(made.travel))))}
    renumbered = [
        replace(event, transfer=order[event.transfer]) if event.transfer >= 0 else event for event in mirrored
    ]
    return renumbered, made.travel[::-1]


def _steps(schedule: Schedule) -> tuple[str, ...]:
    steps = STEPS[schedule.tap]
    return steps[:-1] if schedule.double_gating else steps


class _List:
    """Writes the forward order with the seconds of one of the passes."""

    def __init__(self, unit: Unit, schedule: Schedule, *, backward: bool) -> None:
        self.unit, self.schedule, self.backward = unit, schedule, backward
        self.moe = unit.moe[1 if backward else 0]
        self.events: list[Event] = []
        self.travel: list[float] = []

    def write(self) -> None:
        {
            "none": self._plain,
            "shared_expert": self._shared_expert,
            "chunked": self._chunked,
            "two_batch": self._two_batch,
            "shortcut": self._shortcut,
        }[self.schedule.name]()
        self.events.append(Event("fence"))

    def _part(self, name: str, both: Both, share: float = 1.0) -> None:
        seconds = both.backward if self.backward else both.forward
        self.events.append(Event("part", name, seconds=share * seconds))

    def _route(self, share: float = 1.0) -> None:
        self._score(share)
        self._counts()

    def _score(self, share: float = 1.0) -> None:
        self.events.append(Event("part", "router", seconds=share * self.moe.route))

    def _counts(self) -> None:
        if self.moe.counts and not self.schedule.fused:
            number = len(self.travel)
            self.travel.append(self.moe.counts)  # a plan has counts of its own, however few its tokens
            self.events += [
                Event("start", "dispatch.counts", transfer=number),
                Event("wait", "dispatch.counts", transfer=number),
            ]

    def _dispatch(self, share: float = 1.0) -> None:
        late = self.moe.late if self.schedule.delay_wgrad else 0.0
        if self.schedule.fused:
            return
        times = (self.moe.pack, self.moe.dispatch, self.moe.unpack)
        self._transfer("dispatch", times, self.moe.fixed[0], share, hidden=share * late)

    def _experts(self, share: float = 1.0) -> None:
        late = self.moe.late if self.schedule.delay_wgrad and not self.schedule.fused else 0.0
        self.events.append(Event("part", "experts", seconds=share * (self.moe.experts - late)))

    def _combine(self, share: float = 1.0) -> None:
        if self.schedule.fused:
            return
        self._transfer("combine", (self.moe.gather, self.moe.combine, self.moe.add), self.moe.fixed[1], share)

    def _transfer(
        self, name: str, times: tuple[float, float, float], fixed: float, share: float, *, hidden: float = 0.0
    ) -> None:
        before, wire, behind = times
        number = len(self.travel)
        self.travel.append(fixed + share * (wire - fixed))
        start = Event("start", name, transfer=number, seconds=share * before)
        wait = Event("wait", name, transfer=number, seconds=share * behind)
        # Read backwards, what lies between start and wait is between the reverse transfer's start and its wait.
        overlapped = hidden > 0 and self.schedule.enabled
        late = [Event("part", "weight_gradients", seconds=hidden)] if hidden > 0 else []
        self.events += [start, *late, wait] if overlapped else [*late, start, wait]

    def _plain(self) -> None:
        self._part("attention", self.unit.attention)
        self._route()
        self._dispatch()
        self._experts()
        self._combine()
        self._part("shared", self.unit.shared)

    def _shared_expert(self) -> None:
        self._part("attention", self.unit.attention)
        self._route()
        self._dispatch()
        self._part("shared_up", self.unit.shared, 2 / 3)
        self._experts()
        self._combine()
        self._part("shared_down", self.unit.shared, 1 / 3)

    def _chunked(self) -> None:
        share = 1 / self.schedule.parts
        self._part("attention", self.unit.attention)
        self._score()
        for _ in range(self.schedule.parts):
            self._counts()
        for _ in range(self.schedule.parts):
            self._dispatch(share)
        for _ in range(self.schedule.parts):
            self._experts(share)
            self._combine(share)
        self._part("shared", self.unit.shared)

    def _two_batch(self) -> None:
        for _ in range(2):
            self._part("attention", self.unit.attention, 0.5)
            self._route(0.5)
            self._dispatch(0.5)
        for _ in range(2):
            self._experts(0.5)
            self._combine(0.5)
        for _ in range(2):
            self._part("shared", self.unit.shared, 0.5)

    def _shortcut(self) -> None:
        steps, slot = _steps(self.schedule), self.schedule.slot
        assert slot is not None and slot <= len(steps)
        parts = {
            "attention_before": self.unit.before[0],
            "feed_forward": self.unit.before[1],
            "attention": self.unit.attention,
            "shared": self.unit.shared,
        }
        if self.schedule.tap == "pos2":
            self._part("attention_before", self.unit.before[0])
        self._route()
        self._dispatch()
        for place, name in enumerate(steps):
            if place == slot:
                self._experts()
                self._combine()
            self._part(name, parts[name])
        if slot == len(steps):
            self._experts()
            self._combine()
        if self.schedule.double_gating:
            self._route()
            self._dispatch()
            self._experts()
            self._combine()
