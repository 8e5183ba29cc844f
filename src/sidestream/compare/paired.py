"""Means with Student intervals, quartiles, paired differences. No scipy: the distribution has a closed form."""

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


def student_within(t: float, df: int) -> float:
    """P(|T| < t) of Student's distribution with `df` degrees of freedom.

    Finite sums of Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    assert df >= 1
    theta = math.atan(t / math.sqrt(df))
    sine, square = math.sin(theta), math.cos(theta) ** 2
    # Odd: cos, 2/3 cos^3, 2 4/(3 5) cos^5, ...; even: 1, 1/2 cos^2, 1 3/(2 4) cos^4, ...; both up to cos^(df-2).
    term, total = (math.cos(theta), 0.0) if df % 2 else (1.0, 0.0)
    power = df % 2
    while power <= df - 2:
        total += term
        term *= square * (power + 1) / (power + 2)
        power += 2
    return 2 / math.pi * (theta + sine * total) if df % 2 else sine * total


def student_quantile(df: int, confidence: float = CONFIDENCE) -> float:
    """The t with P(|T| < t) = `confidence`: 12.706 for one degree of freedom and 95 %."""
    assert 0 < confidence < 1
    low, high = 0.0, 1.0
    while student_within(high, df) < confidence:
        high *= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if student_within(middle, df) < confidence:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The mean of at least one value, with the interval for independent, normal values."""
    n, mean = len(values), statistics.fmean(values)
    if n < 2:
        return Interval(mean=mean, low=None, high=None, n=n)
    half = student_quantile(n - 1, confidence) * statistics.stdev(values) / math.sqrt(n)
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
    if not values:
        return None
    if len(values) == 1:
        return values[0], values[0], values[0]
    first, middle, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, middle, third


def median(values: Sequence[float | None]) -> float | None:
    """The median of the values that are there; None without any."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
