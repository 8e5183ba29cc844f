"""The least time that a schedule can take with parts of measured length. Pure: no torch, no clock.

A pass is a list of events in the order of the program: work, starts of transfers, waits for them. Work and what lies
between (packing, sums, norms) run one after another; transfers run one after another on the wire, each not before its
start. `duration` is the time of such a list.

`best_order` takes the list of a *serial* pass and moves every wait to where the result is first read (dispatch: before
its experts; combine: at the end of the unit), and in backward every start to where its rows are first there (combine:
at the beginning; dispatch: behind its experts). The work keeps the order that the schedule gave it. So the bound
follows from the schedule's order of work, not from how it happened to run: a wait in the wrong place does not lower it.

With d and c for dispatch and combine, e for the experts, and work that can hide nothing left out, that is

    shortcut        max(pre, d) + e + max(post, c)         pre, post: the steps before and behind the experts' slot
    shared_expert   max(up, d) + e + max(down, c)          up, down: the two parts of the shared expert
    chunked         D_i = D_(i-1) + d_i;   E_i = max(E_(i-1), D_i) + e_i;   C_i = max(C_(i-1), D_n, E_i) + c_i
                    max(E_n + shared, C_n): the first dispatch, and the last combine but for the shared expert, stay
                    exposed, so n equal chunks hide at most 1 - 1/n of both
    two_batch       the same with n = 2, where D_2 starts behind the second half's attention: it hides D_1
    none            all of it, one after another

and in backward the same with the order reversed: max(post', c') + e' + max(pre', d'). Weight gradients that are put off
(`delay_wgrad`) are work between the start of the reverse dispatch and its wait.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

EXPERTS = "experts"
DISPATCH, COMBINE = ("dispatch", "dispatch.routes"), ("combine",)
BACKWARD = ".backward"


@dataclass(frozen=True)
class Event:
    """One entry of a pass.

    Attributes:
        kind: `part`: work with a name. `start`, `wait`: of a transfer. `fence`: forward: the end of a unit; backward:
            its beginning.
        name: Of the part, or the transfer's tag.
        backward: Of the part; a transfer's tag says it.
        transfer: Number of the transfer in the order of the starts of the serial pass, for `start` and `wait`.
        seconds: Work that belongs to this entry: the part with what is needed to come to it, the packing before a
            start, the unpacking behind a wait.
    """

    kind: Literal["part", "start", "wait", "fence"]
    name: str = ""
    backward: bool = False
    transfer: int = -1
    seconds: float = 0.0


def duration(events: Sequence[Event], transfer_seconds: Sequence[float]) -> float:
    """Seconds of a pass in this order.

    Args:
        transfer_seconds: Of each transfer alone on the wire, by its number.
    """
    now = wire_free = 0.0
    arrives: dict[int, float] = {}
    for event in events:
        if event.kind == "wait":
            now = max(now, arrives[event.transfer]) + event.seconds
            continue
        now += event.seconds
        if event.kind == "start":
            wire_free = max(now, wire_free) + transfer_seconds[event.transfer]
            arrives[event.transfer] = wire_free
    return now


def best_order(events: Sequence[Event]) -> list[Event]:
    """The order in which a pass takes the least time without another order of work; see the module."""
    return _early_starts(_late_waits(list(events)))


def hideable(events: Sequence[Event], transfer_seconds: Sequence[float]) -> float:
    """Seconds that a serial pass loses at best when its schedule overlaps."""
    return duration(events, transfer_seconds) - duration(best_order(events), transfer_seconds)


def _late_waits(events: list[Event]) -> list[Event]:
    """Forward: the waits for a dispatch move before its experts, those for a combine to the end of the unit."""
    out: list[Event] = []
    for_experts: dict[int, list[Event]] = defaultdict(list)
    for_end: list[Event] = []
    seen: dict[str, int] = defaultdict(int)
    for event in events:
        if event.kind == "wait" and event.name in DISPATCH:
            for_experts[seen[event.name]].append(event)
            seen[event.name] += 1
            continue
        if event.kind == "wait" and event.name in COMBINE:
            for_end.append(event)
            continue
        if event.kind == "part" and event.name == EXPERTS and not event.backward:
            out += for_experts.pop(seen[EXPERTS], [])
            seen[EXPERTS] += 1
        if event.kind == "fence" and not event.backward:
            out += for_end
            for_end = []
        out.append(event)
    assert not for_experts, "a dispatch without experts"
    return out + for_end


def _early_starts(events: list[Event]) -> list[Event]:
    """Backward: the starts of a combine's reverse move to the beginning, those of a dispatch's behind its experts."""
    # Read backwards in time this is the forward pass: starts are its waits.
    mirrored = [mirror(event) for event in reversed(events)]
    return [mirror(event) for event in reversed(_late_waits(mirrored))]


def mirror(event: Event, *, transfer: int | None = None) -> Event:
    """What it is in the other pass, read from the end: a start is a wait. `transfer`: its number there."""
    kind, name = event.kind, event.name
    if kind in ("start", "wait"):
        kind = "wait" if kind == "start" else "start"
        name = name.removesuffix(BACKWARD) if name.endswith(BACKWARD) else name + BACKWARD
    number = event.transfer if transfer is None else transfer
    return Event(kind, name, not event.backward, number, event.seconds)
