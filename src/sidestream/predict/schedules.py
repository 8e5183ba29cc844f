"""Seconds of a unit under a schedule: prices on the order of work that `predict.order` records.

    forward    the entries as the schedule ran them, every one with its seconds
    backward   the same read from the end: a start is a wait, and the other way round
    serial     every wait behind its start

Transfers run one after another on the wire, beside the work (`profiling.bound.duration`). The order is recorded
on tensors without values, so torch is imported when the first one is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from sidestream.predict.layer import Seconds
from sidestream.profiling.bound import Event, duration, mirror

if TYPE_CHECKING:
    from sidestream.model.config import ModelShape
    from sidestream.overlap.base import Schedule
    from sidestream.predict.order import Entry

SHARED_UP, SHARED_DOWN = 2 / 3, 1 / 3  # of the shared expert's time: two of its three products, and one


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
        attention, shared: The MoE block's; `shared` with its norm.
        own_wire: `moe` with the machine's own transport, where `moe` has an emulated link. None: the same.
        before: Attention and feed-forward of the dense block in front, where the unit runs it.
        moe: The routed path, forward and backward.
    """

    attention: Both
    shared: Both
    moe: tuple[Seconds, Seconds]
    before: tuple[Both, Both] = (NOTHING, NOTHING)
    own_wire: tuple[Seconds, Seconds] | None = None

    @property
    def parts(self) -> dict[str, Both]:
        """Seconds by the names of the order of work, but for the routed path."""
        return {
            "attention": self.attention,
            "attention_before": self.before[0],
            "feed_forward": self.before[1],
            "shared": self.shared,
            "shared_up": self.shared * SHARED_UP,
            "shared_down": self.shared * SHARED_DOWN,
        }


@dataclass(frozen=True)
class Pass:
    """One pass of a unit.

    Attributes:
        seconds: In the order of work that the schedule chooses.
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


@dataclass(frozen=True)
class Work:
    """A schedule in the units of a model.

    Attributes:
        schedule: An overlap option.
        shape: The model.
        sequences, seq_length, top_k: Sequences of a rank's forward pass, their tokens, routes per token.
        fused: Dispatch, experts and combine are one operation.
        interleaved: Share of the passes beside which one of another micro-batch runs, so that all compute may hide all
            transfers (Megatron-Core's `--overlap-moe-expert-parallel-comm`); 0: none. Training has no such schedule.
    """

    schedule: Schedule
    shape: ModelShape
    sequences: int
    seq_length: int
    top_k: int
    fused: bool = False
    interleaved: float = 0.0
    _recorded: dict[bool, list[list[Entry]]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def reads_before(self, block: int) -> bool:
        """The unit of a block runs the dense block in front of it as well. `block` may be one past the last."""
        in_front = 0 < block < self.shape.num_layers and block - 1 not in self.shape.moe_blocks
        return in_front and self.schedule.reads_before()

    def orders(self, *, before: bool) -> list[list[Entry]]:
        """See `predict.order.orders`.

        Raises:
            ValueError: It cannot be recorded.
        """
        from sidestream.predict.order import orders

        if before not in self._recorded:
            self._recorded[before] = orders(
                self.schedule,
                self.shape,
                sequences=self.sequences,
                seq_length=self.seq_length,
                top_k=self.top_k,
                before=before,
            )
        return self._recorded[before]

    @property
    def gates(self) -> int:
        """Times that a layer's experts are used for a token: twice under DGMoE."""
        entries = self.orders(before=self.reads_before(self.shape.moe_blocks[-1]))[0]
        return round(sum(entry.share for entry in entries if entry.name == "experts"))

    def with_schedule(self, schedule: Schedule) -> Work:
        """Another schedule in the same units, with experts that are not fused."""
        return replace(self, schedule=schedule, fused=False, interleaved=0.0)

    @cached_property
    def plain(self) -> Work:
        """The same without overlap."""
        from sidestream.overlap.none import NoOverlap

        return self.with_schedule(NoOverlap())


def passes(
    unit: Unit, work: Work, *, before: bool = False, wire_on_compute: float = 0.0
) -> tuple[Pass, Pass]:
    """Forward and backward of a unit; under the best slot, where the schedule chooses one.

    Args:
        before: The unit runs the dense block in front.
        wire_on_compute: Seconds that a transfer adds to the compute it hides behind, per second that it takes on the
            machine's own transport.
    """
    found = [
        (
            _timed(entries, unit, work, wire_on_compute, backward=False),
            _timed(entries, unit, work, wire_on_compute, backward=True),
        )
        for entries in work.orders(before=before)
    ]
    return min(found, key=lambda both: both[0].seconds + both[1].seconds)


def _timed(
    entries: Sequence[Entry], unit: Unit, work: Work, wire_on_compute: float, *, backward: bool
) -> Pass:
    listed, travel = events(entries, unit, work, backward=backward)
    waiting, _ = events(_serial(entries), unit, work, backward=backward)
    serial, compute = duration(waiting, travel), sum(event.seconds for event in waiting)
    best = duration(listed, travel)
    if work.interleaved:
        best = serial - work.interleaved * (serial - max(compute, sum(travel)))
    copied = travel
    if unit.own_wire is not None:
        copied = events(entries, replace(unit, moe=unit.own_wire), work, backward=backward)[1]
    # What is hidden takes its share of the cores from what hides it; a schedule never does worse than waiting.
    taken = wire_on_compute * (sum(copied) / sum(travel) if sum(travel) else 0.0)
    return Pass(min(serial, best + taken * (serial - best)), serial, compute, sum(travel))


def _serial(entries: Sequence[Entry]) -> list[Entry]:
    """Every transfer is waited for where it starts, and late weight gradients are computed before."""
    out: list[Entry] = []
    for previous, entry in zip((None, *entries), entries):
        if entry.kind == "start":
            out += [entry, replace(entry, kind="wait")]
        elif entry.name == "weight_gradients" and previous is not None and previous.kind == "start":
            out.insert(-2, entry)
        elif entry.kind == "part":
            out.append(entry)
    return out


def events(
    entries: Sequence[Entry], unit: Unit, work: Work, *, backward: bool
) -> tuple[list[Event], list[float]]:
    """A pass with its prices, and the seconds of its transfers."""
    moe = unit.moe[1 if backward else 0]
    late = any(entry.name == "weight_gradients" for entry in entries) and not work.fused
    seconds = {name: both.backward if backward else both.forward for name, both in unit.parts.items()}
    seconds |= {"router": moe.route, "experts": moe.experts - (moe.late if late else 0.0)}
    seconds["weight_gradients"] = moe.late if late else 0.0
    # Of a transfer: work before its start, on the wire, the share of it without any rows, work behind its wait.
    transfers = (
        {}
        if work.fused
        else {
            "dispatch": (moe.pack, moe.dispatch, moe.fixed[0], moe.unpack),
            "combine": (moe.gather, moe.combine, moe.fixed[1], moe.add),
        }
    )
    if moe.counts and not work.fused:
        # A plan has counts of its own, however few its tokens.
        transfers["dispatch.counts"] = (0.0, moe.counts, moe.counts, 0.0)
    made: list[Event] = []
    travel: list[float] = []
    numbers: dict[int, int] = {}
    for entry in entries:
        if entry.kind == "part":
            made.append(Event("part", entry.name, seconds=entry.share * seconds[entry.name]))
        elif entry.name in transfers:
            pack, wire, fixed, unpack = transfers[entry.name]
            if entry.kind == "start":
                numbers[entry.transfer] = len(travel)
                travel.append(fixed + entry.share * (wire - fixed))
            beside = pack if entry.kind == "start" else unpack
            made.append(
                Event(entry.kind, entry.name, transfer=numbers[entry.transfer], seconds=entry.share * beside)
            )
    made.append(Event("fence"))
    if not backward:
        return made, travel
    # A transfer is as long both ways; the last one is the first one here.
    last = len(travel) - 1
    return [
        mirror(event, transfer=last - event.transfer if event.transfer >= 0 else -1)
        for event in reversed(made)
    ], travel[::-1]
