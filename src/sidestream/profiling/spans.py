"""One pass as it was recorded: its bars for a picture, its events for a bound."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sidestream.exchange.ops import Span
from sidestream.profiling.bound import BACKWARD, Event
from sidestream.profiling.trace import PartSpan

COMPUTE, WIRE = "compute", "communication"
REST = "rest"  # what is computed between the parts: packing, sums, norms
SHORTEST_REST_S = 20e-6  # below it lies the clockwork itself


@dataclass(frozen=True)
class Bar:
    """A stretch of one lane. Times in seconds since the pass began."""

    lane: Literal["compute", "communication"]
    name: str
    backward: bool
    begin: float
    end: float


@dataclass(frozen=True)
class PassTrace:
    """What was recorded of one pass on one rank. Times in `time.monotonic()` seconds.

    Attributes:
        begin, end: When the pass began and ended on this rank.
        parts, fences: See `profiling.trace.Tracer`.
        spans: The channel's transfers.
    """

    begin: float
    end: float
    parts: tuple[PartSpan, ...]
    fences: tuple[tuple[float, bool], ...]
    spans: tuple[Span, ...]

    @property
    def busy(self) -> float:
        """Seconds that were not spent waiting."""
        return self.end - self.begin - sum(span.completed - span.wait_began for span in self.spans)

    def bars(self) -> list[Bar]:
        """Every recorded stretch, in seconds since the pass began, ordered by its beginning."""
        found = [_bar(COMPUTE, part.name, part.backward, part.begin, part.end) for part in self.parts]
        found += self._rest() + self._transfers()
        moved = [replace(bar, begin=bar.begin - self.begin, end=bar.end - self.begin) for bar in found]
        return sorted(moved, key=lambda bar: bar.begin)

    def _rest(self) -> list[Bar]:
        """The time of this rank that is in no part and in no wait."""
        taken = sorted(
            [(part.begin, part.end) for part in self.parts]
            + [(span.wait_began, span.completed) for span in self.spans]
        )
        bars, free_from = [], self.begin
        for begin, end in [*taken, (self.end, self.end)]:
            if begin - free_from > SHORTEST_REST_S:
                bars.append(_bar(COMPUTE, REST, False, free_from, begin))
            free_from = max(free_from, end)
        return bars

    def _transfers(self) -> list[Bar]:
        """One wire: a transfer begins when it is issued and those before it have arrived."""
        bars, free_at = [], self.begin
        for span in sorted(self.spans, key=lambda span: span.issued):
            arrived = span.completed if span.arrived is None else span.arrived
            begin, free_at = max(span.issued, free_at), max(arrived, free_at)
            name = span.tag.removesuffix(BACKWARD)
            bars.append(_bar(WIRE, name, span.tag.endswith(BACKWARD), min(begin, arrived), arrived))
        return bars

    def events(self) -> list[Event]:
        """The pass as `profiling.bound` takes it. For a pass in which no wait waited.

        Time between two entries belongs to a wait in front of it (unpacking), else to what follows.
        """
        moments = [
            (part.begin, part.end, Event("part", part.name, part.backward, seconds=part.end - part.begin))
            for part in self.parts
        ]
        moments += [(when, when, Event("fence", backward=backward)) for when, backward in self.fences]
        for number, span in enumerate(sorted(self.spans, key=lambda span: span.issued)):
            moments.append((span.issued, span.issued, Event("start", span.tag, transfer=number)))
            waited = Event(
                "wait", span.tag, transfer=number, seconds=max(0.0, span.completed - span.wait_began)
            )
            moments.append((span.wait_began, span.completed, waited))
        moments.sort(key=lambda moment: moment[:2])
        moments.append((self.end, self.end, Event("part", REST)))
        events: list[Event] = []
        free_from = self.begin
        for begin, end, event in moments:
            between = max(0.0, begin - free_from)
            if events and events[-1].kind == "wait":
                events[-1] = replace(events[-1], seconds=events[-1].seconds + between)
            else:
                event = replace(event, seconds=event.seconds + between)
            events.append(event)
            free_from = max(free_from, end)
        return events


def _bar(lane: str, name: str, backward: bool, begin: float, end: float) -> Bar:
    return Bar(lane, name, backward, begin, end)  # type: ignore[arg-type]


def median_events(runs: Sequence[Sequence[Event]]) -> list[Event]:
    """The events of several runs of one pass, with the median of their times."""
    first, *others = ([replace(event, seconds=0.0) for event in run] for run in runs)
    assert all(other == first for other in others), "the order of work differs between two runs of one pass"
    columns = zip(*(tuple(event.seconds for event in run) for run in runs))
    return [replace(event, seconds=statistics.median(column)) for event, column in zip(first, columns)]
