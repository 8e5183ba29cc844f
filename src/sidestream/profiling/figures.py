"""What four times say about overlap. Pure: no torch, no clock.

    compute     no exchange: what they would bring is there already
    comm        only the exchanges, each after the one before it
    serial      the schedule with every transfer waited for where it starts
    overlapped  the schedule

    E_hide = (serial - overlapped) / min(compute, comm)        of what could be hidden, the share that was
    E_comm = (serial - overlapped) / (serial - compute)        of what exchanges add to the serial run, the share gone

The gain is measured as a difference of two runs and never computed as `compute + comm - overlapped`: the sum of the
parts is not the serial run, and its error would be booked as a gain or a loss of overlap. Nothing is clipped:
below 0 the schedule is slower than its serial run, above 1 something was measured wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LITTLE = 0.10  # share of the serial time below which hiding all communication changes little


@dataclass(frozen=True, kw_only=True)
class OverlapReport:
    """Times in seconds; a ratio is None where it is not defined, or where the times are below the clock's noise.

    Attributes:
        t_comp, t_comm, t_serial, t_overlap: The four times.
        e_hide, e_comm: See the module.
        exposed: Share of the step, or of the overlapped run itself, that exchanges still add to compute.
        comm_share: Communication over the serial time.
        speedup: Serial over overlapped.
        contention: Time computed while exchanges were under way, over compute alone; 1 is undisturbed.
        bound: The largest E_hide that this schedule can reach with these parts, see `profiling.bound`.
        reached: Share of the time that this schedule can hide which it did hide.
    """

    t_comp: float
    t_comm: float
    t_serial: float
    t_overlap: float
    e_hide: float | None
    e_comm: float | None
    exposed: float | None
    comm_share: float | None
    speedup: float | None
    contention: float | None = None
    bound: float | None = None
    reached: float | None = None

    @property
    def little_to_hide(self) -> bool:
        """Communication is so small a part that the efficiency hardly matters."""
        return self.comm_share is not None and self.comm_share < LITTLE


def overlap_report(
    t_comp: float,
    t_comm: float,
    t_serial: float,
    t_overlap: float,
    t_step: float | None = None,
    *,
    hideable: float | None = None,
    busy: float | None = None,
    noise: float = 0.0,
) -> OverlapReport:
    """Report on four times of the same work.

    Args:
        t_comp, t_comm, t_serial, t_overlap: Seconds.
        t_step: Seconds of the step of which `exposed` is a share; None: of the overlapped run.
        hideable: Seconds that the schedule can hide at best.
        busy: Seconds computed in the overlapped run, waiting left out.
        noise: Seconds; a time or difference that is not above it divides nothing.

    Raises:
        ValueError: A time is negative or not finite.
    """
    times = {"t_comp": t_comp, "t_comm": t_comm, "t_serial": t_serial, "t_overlap": t_overlap}
    for name, value in times.items():
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{name}={value}: expected seconds, at least 0")

    def over(value: float | None, whole: float) -> float | None:
        return value / whole if value is not None and whole > noise else None

    gain, least = t_serial - t_overlap, min(t_comp, t_comm)
    return OverlapReport(
        **times,
        e_hide=over(gain, least),
        e_comm=over(gain, t_serial - t_comp),
        exposed=over(t_overlap - t_comp, t_overlap if t_step is None else t_step),
        comm_share=over(t_comm, t_serial),
        speedup=over(t_serial, t_overlap),
        contention=over(busy, t_comp),
        bound=over(hideable, least),
        reached=None if hideable is None else over(gain, hideable),
    )


def hidden_seconds(
    transfers: Sequence[tuple[float, float]], compute: Sequence[tuple[float, float]]
) -> tuple[float, float]:
    """Seconds in which something travels and the rank computes, and seconds in which something travels.

    Their ratio, E_trace, is what profilers call overlap. It says whether work was done beside a transfer, not whether
    time was gained: compute that is slowed down by the transfer counts in full.

    Args:
        transfers, compute: Intervals (begin, end), in any order.
    """
    travelling, computing = _union(transfers), _union(compute)
    both = sum(
        max(0.0, min(end, other_end) - max(begin, other_begin))
        for begin, end in travelling
        for other_begin, other_end in computing
    )
    return both, sum(end - begin for begin, end in travelling)


def _union(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same time as intervals that do not overlap, in order."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def ratio(value: float | None, *, digits: int = 2) -> str:
    """A ratio for people: `-` where it is not defined."""
    return "-" if value is None else f"{value:.{digits}f}"


def one_line(serial_ms: float, overlapped_ms: float, *, e_hide: float | None, bound: float | None) -> str:
    """The line that a run prints at its end."""
    return (
        f"overlap of one MoE unit: {serial_ms:.1f} ms serial, {overlapped_ms:.1f} ms overlapped; "
        f"E_hide {ratio(e_hide)}, at most {ratio(bound)} with this schedule"
    )


def remarks(report: OverlapReport, *, throttled: bool, changes: bool = True) -> list[str]:
    """What a reader should know beside the figures.

    Args:
        throttled: The link is emulated already.
        changes: The schedule overlaps anything at all.
    """
    lines = []
    if report.little_to_hide:
        share = ratio(100 * (report.comm_share or 0.0), digits=1)
        more = "a lower link.gbps" if throttled else "link=throttled link.gbps=1, or measure.comm_share=0.3"
        lines.append(
            f"communication is {share} % of the unit, below {100 * LITTLE:.0f} %: there is little to hide; {more} "
            f"shows what a slower wire would do"
        )
    if not changes:
        lines.append(
            "this schedule waits for every transfer where it starts: serial and overlapped are one run"
        )
    if report.e_hide is not None and report.e_hide > 1.05:
        lines.append(
            f"E_hide {report.e_hide:.2f} is above 1: measured wrongly, look at the spread of the rounds"
        )
    if report.e_hide is not None and report.e_hide < 0:
        lines.append("overlapped is slower than serial")
    if report.contention is not None and report.contention > 1.1:
        lines.append(
            f"compute takes {report.contention:.2f} x as long while rows travel: it shares the cores with the transport"
        )
    return lines
