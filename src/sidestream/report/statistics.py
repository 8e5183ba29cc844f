"""What many values are told as: quartiles, means with Student intervals, differences paired by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean and its confidence interval; `low` and `high` are None for fewer than two values."""

    mean: float
    low: float | None
    high: float | None
    n: int

    @property
    def excludes_zero(self) -> bool:
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The mean of at least one value, with the interval of Student's t for independent, normal values."""
    n, mean = len(values), statistics.fmean(values)
    if n < 2:
        return Interval(mean=mean, low=None, high=None, n=n)
    from scipy.special import stdtrit  # the quantile of Student's t; takes a second to import

    half = float(stdtrit(n - 1, (1 + confidence) / 2)) * statistics.stdev(values) / math.sqrt(n)
    return Interval(mean=mean, low=mean - half, high=mean + half, n=n)


def paired(values: Mapping[int, float], baseline: Mapping[int, float]) -> Interval | None:
    """The mean of value minus baseline over their common seeds; None where there is none.

    Args:
        values, baseline: Seed -> value.
    """
    common = sorted(values.keys() & baseline.keys())
    return interval([values[seed] - baseline[seed] for seed in common]) if common else None


def quartiles(values: Sequence[float]) -> tuple[float, float, float] | None:
    """(first quartile, median, third quartile), None without values."""
    if len(values) < 2:
        return (values[0], values[0], values[0]) if values else None
    first, middle, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, middle, third


def median(values: Sequence[float | None]) -> float | None:
    """The median of the values that are there; None without any."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def summarize(values: Sequence[float]) -> dict[str, float]:
    """Minimum, quartiles, median and maximum of a list of rounds."""
    ordered = sorted(values)
    q1, _, q3 = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
    return {
        "min": ordered[0],
        "q1": round(q1, 4),
        "median": round(statistics.median(ordered), 4),
        "q3": round(q3, 4),
        "max": ordered[-1],
    }
