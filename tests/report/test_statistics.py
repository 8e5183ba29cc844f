"""Student's quantiles against tables, intervals by hand, pairing by seed."""

import math
import statistics

import pytest

from sidestream.report.statistics import interval, median, paired, quartiles


def quantile(df: int, confidence: float = 0.95) -> float:
    """The t that an interval of df + 1 values was made with."""
    values = [float(n % 2) for n in range(df + 1)]
    found = interval(values, confidence)
    return (found.high - found.mean) * math.sqrt(df + 1) / statistics.stdev(values)


@pytest.mark.parametrize(
    ("df", "two_sided_95"),
    # Any printed table of Student's t, column 0.975.
    [
        (1, 12.706),
        (2, 4.303),
        (3, 3.182),
        (4, 2.776),
        (5, 2.571),
        (9, 2.262),
        (11, 2.201),
        (30, 2.042),
        (120, 1.980),
    ],
)
def test_quantiles_are_those_of_the_table(df: int, two_sided_95: float):
    assert quantile(df) == pytest.approx(two_sided_95, abs=5e-4)


@pytest.mark.parametrize(
    ("df", "confidence", "value"), [(1, 0.5, 1.0), (2, 0.99, 9.925), (7, 0.90, 1.895), (10, 0.999, 4.587)]
)
def test_other_confidences(df: int, confidence: float, value: float):
    assert quantile(df, confidence) == pytest.approx(value, abs=5e-4)


def test_it_becomes_normal():
    assert quantile(20_000) == pytest.approx(1.96, abs=1e-3)


def test_an_interval_by_hand():
    found = interval([1.0, 2.0, 3.0])
    assert (found.mean, found.n) == (2.0, 3)
    assert found.high == pytest.approx(2.0 + 4.302653 / math.sqrt(3), abs=1e-6)
    assert found.low == pytest.approx(4.0 - found.high)
    assert not found.excludes_zero or found.low > 0


def test_one_value_has_no_interval():
    found = interval([1.0])
    assert (found.mean, found.low, found.high, found.n) == (1.0, None, None, 1)
    assert not found.excludes_zero


def test_pairs_are_common_seeds():
    found = paired({1: 1.0, 2: 2.5, 9: 100.0}, {1: 0.5, 2: 1.0, 3: -100.0})
    assert (found.mean, found.n) == (1.0, 2)
    assert paired({1: 1.0}, {2: 1.0}) is None


def test_pairing_takes_the_spread_of_the_seeds_out():
    found = paired({1: 1.1, 2: 5.1, 3: 9.1}, {1: 1.0, 2: 5.0, 3: 9.0})
    assert found.excludes_zero and found.high - found.low < 1e-6


def test_quartiles_and_medians():
    assert quartiles([4.0, 1.0, 2.0, 3.0, 5.0]) == (2.0, 3.0, 4.0)
    assert quartiles([7.0]) == (7.0, 7.0, 7.0) and quartiles([]) is None
    assert median([None, 3.0, 1.0]) == 2.0 and median([None]) is None
