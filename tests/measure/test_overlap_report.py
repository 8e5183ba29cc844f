"""The pure part of measuring overlap: ratios of four times, and what a schedule can reach at most."""

import random
from dataclasses import replace

import pytest

from sidestream.profiling.bound import Event, best_order, duration, hideable
from sidestream.profiling.figures import hidden_seconds, overlap_report, remarks
from sidestream.profiling.spans import median_events

SEEDS = range(8)


def times(seed: int) -> tuple[float, float, float]:
    """Compute, communication, serial: with a serial run that is longer than the sum, as it is in practice."""
    draw = random.Random(seed)
    compute, communication = draw.uniform(0.01, 1.0), draw.uniform(0.01, 1.0)
    return compute, communication, compute + communication * draw.uniform(1.0, 1.3)


# Ratios.


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_gained_is_zero_and_all_that_could_be_hidden_is_one(seed: int):
    compute, communication, serial = times(seed)
    same = overlap_report(compute, communication, serial, serial)
    assert same.e_hide == same.e_comm == 0 and same.speedup == 1
    best = overlap_report(compute, communication, serial, serial - min(compute, communication))
    assert best.e_hide == pytest.approx(1)
    gone = overlap_report(compute, communication, serial, compute)
    assert gone.e_comm == pytest.approx(1) and gone.exposed == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_unit_of_time_changes_no_ratio(seed: int):
    compute, communication, serial = times(seed)
    given = (compute, communication, serial, 0.8 * serial)
    one = overlap_report(*given, 3 * serial, hideable=0.5 * communication, busy=1.1 * compute)
    other = overlap_report(
        *(1e3 * t for t in given), 3e3 * serial, hideable=500 * communication, busy=1100 * compute
    )
    for name in ("e_hide", "e_comm", "exposed", "comm_share", "speedup", "contention", "bound", "reached"):
        assert getattr(other, name) == pytest.approx(getattr(one, name)), name


@pytest.mark.parametrize("seed", SEEDS)
def test_a_faster_overlapped_run_is_always_better_and_nothing_is_clipped(seed: int):
    compute, communication, serial = times(seed)
    overlapped = [serial * (2.0 - 0.2 * step) for step in range(10)]
    reports = [overlap_report(compute, communication, serial, t) for t in overlapped]
    for name in ("e_hide", "e_comm", "speedup"):
        values = [getattr(report, name) for report in reports]
        assert values == sorted(values) and len(set(values)) == len(values), name
    assert reports[0].e_hide < 0 and reports[-1].e_hide > 1


@pytest.mark.parametrize("seed", SEEDS)
def test_the_two_efficiencies_agree_on_what_is_gained(seed: int):
    compute, communication, serial = times(seed)
    report = overlap_report(compute, communication, serial, 0.9 * serial)
    assert report.e_hide * min(compute, communication) == pytest.approx(0.1 * serial)
    assert report.e_comm * (serial - compute) == pytest.approx(0.1 * serial)
    assert report.e_comm == pytest.approx(1 - (report.t_overlap - compute) / (serial - compute))


def test_the_gain_is_measured_and_not_a_sum_of_parts():
    """The busy two-core example of the definition: the sum would blame overlap for what serial pays too."""
    report = overlap_report(97.0, 10.6, 112.5, 113.1)
    assert report.e_comm == pytest.approx(-0.04, abs=0.005)
    assert report.e_hide == pytest.approx(-0.6 / 10.6)


def test_what_cannot_be_divided_is_none():
    report = overlap_report(1.0, 0.0, 1.0, 1.0)
    assert (report.e_hide, report.e_comm) == (None, None) and report.comm_share == 0
    noisy = overlap_report(1.0, 4e-5, 1.00004, 1.0, noise=5e-5, hideable=4e-5)
    assert (noisy.e_hide, noisy.e_comm, noisy.bound, noisy.reached) == (None, None, None, None)
    assert overlap_report(1.0, 0.2, 0.9, 0.8).e_comm is None
    assert (report.contention, report.bound, report.reached) == (None, None, None)


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_times_that_are_none_are_refused(wrong: float):
    with pytest.raises(ValueError, match=r"t_serial=.*: expected seconds"):
        overlap_report(1.0, 1.0, wrong, 1.0)


def test_little_communication_is_said():
    small, large = overlap_report(1.0, 0.05, 1.05, 1.02), overlap_report(1.0, 0.5, 1.5, 1.2)
    assert "below 10 %" in (line := remarks(small, throttled=False)[0]) and "link=throttled" in line
    assert remarks(large, throttled=False) == []
    assert any("slower than serial" in line for line in remarks(overlap_report(1, 1, 2, 2.1), throttled=True))


def test_time_that_is_both_is_counted_once():
    assert hidden_seconds([(0, 2), (1, 3)], [(2, 5), (2.5, 4)]) == (1, 3)
    assert hidden_seconds([], [(0, 1)]) == (0, 0)
    assert hidden_seconds([(0, 1), (4, 5)], [(1, 4)]) == (0, 2)


# The bound. Serial passes as they are recorded: a wait behind every start.


def part(name: str, seconds: float) -> Event:
    return Event("part", name, seconds=seconds)


def travels(tag: str, number: int) -> list[Event]:
    return [Event("start", tag, transfer=number), Event("wait", tag, transfer=number)]


def reversed_pass(events: list[Event]) -> list[Event]:
    """Backward of a serial pass, transfers numbered in their new order."""
    back, numbers = [], iter(range(100))
    for event in reversed(events):
        if event.kind == "start":  # start and wait are neighbours
            continue
        if event.kind == "wait":
            back += travels(f"{event.name}.backward", next(numbers))
        else:
            back.append(replace(event, backward=True))
    return back


def drawn(seed: int, count: int) -> list[float]:
    draw = random.Random(seed)
    return [draw.uniform(0.1, 1.0) for _ in range(count)]


@pytest.mark.parametrize("seed", SEEDS)
def test_shortcut(seed: int):
    before, attention, shared, experts, d, c = drawn(seed, 6)
    forward = [
        part("router", 0.1),
        *travels("dispatch", 0),
        part("feed_forward", before),
        part("experts", experts),
        *travels("combine", 1),
        part("attention", attention),
        part("shared", shared),
    ]
    best = max(before, d) + experts + max(attention + shared, c) + 0.1
    assert duration(best_order(forward), [d, c]) == pytest.approx(best)
    assert duration(forward, [d, c]) == pytest.approx(0.1 + sum((before, attention, shared, experts, d, c)))
    assert duration(best_order(reversed_pass(forward)), [c, d]) == pytest.approx(best)


@pytest.mark.parametrize("seed", SEEDS)
def test_shared_expert(seed: int):
    attention, up, down, experts, d, c = drawn(seed, 6)
    forward = [
        part("attention", attention),
        *travels("dispatch", 0),
        part("shared_up", up),
        part("experts", experts),
        *travels("combine", 1),
        part("shared_down", down),
    ]
    best = attention + max(up, d) + experts + max(down, c)
    assert duration(best_order(forward), [d, c]) == pytest.approx(best)
    assert duration(best_order(reversed_pass(forward)), [c, d]) == pytest.approx(best)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("n", [2, 4])
def test_chunked(seed: int, n: int):
    attention, shared, *rest = drawn(seed, 2 + 3 * n)
    d, e, c = rest[:n], rest[n : 2 * n], rest[2 * n :]
    forward = [part("attention", attention)]
    for i in range(n):
        forward += travels("dispatch", i)
    for i in range(n):
        forward += [part("experts", e[i]), *travels("combine", n + i)]
    forward.append(part("shared", shared))
    arrived = computed = attention
    dispatched = []
    for seconds in d:
        arrived += seconds
        dispatched.append(arrived)
    for i in range(n):
        computed = max(computed, dispatched[i]) + e[i]
        arrived = max(arrived, computed) + c[i]
    best = max(computed + shared, arrived)
    assert duration(best_order(forward), [*d, *c]) == pytest.approx(best)
    first_and_last = hideable(forward, [*d, *c])
    assert first_and_last <= sum(d[1:]) + sum(c[:-1]) + min(shared, c[-1]) + 1e-9


@pytest.mark.parametrize("seed", SEEDS)
def test_two_batch(seed: int):
    a, e, s, d, c = (drawn(seed + 100 * k, 2) for k in range(5))
    forward = [
        part("attention", a[0]),
        *travels("dispatch", 0),
        part("attention", a[1]),
        *travels("dispatch", 1),
        part("experts", e[0]),
        *travels("combine", 2),
        part("experts", e[1]),
        *travels("combine", 3),
        part("shared", s[0]),
        part("shared", s[1]),
    ]
    first = a[0] + d[0]
    second = max(first, a[0] + a[1]) + d[1]
    computed = max(first, a[0] + a[1]) + e[0]
    back = max(second, computed) + c[0]
    computed = max(second, computed) + e[1]
    best = max(max(back, computed) + c[1], computed + sum(s))
    assert duration(best_order(forward), [*d, *c]) == pytest.approx(best)


def test_backward_with_late_weight_gradients():
    """They lie between start and wait in the serial run too, and hide the reverse dispatch before attention does."""
    start, wait = travels("dispatch.backward", 1)
    backward = [
        replace(part("shared", 1.0), backward=True),
        *travels("combine.backward", 0),
        replace(part("experts", 2.0), backward=True),
        replace(part("attention", 1.0), backward=True),
        start,
        replace(part("weight_gradients", 2.0), backward=True),
        wait,
    ]
    assert duration(backward, [3.0, 2.5]) == pytest.approx(1 + 3 + 2 + 1 + 2.5)
    assert duration(best_order(backward), [3.0, 2.5]) == pytest.approx(3 + 2 + 3)


def test_waits_stay_inside_their_unit():
    """Two units one after another, as in a step: the second one's work hides nothing of the first."""
    unit = [
        *travels("dispatch", 0),
        part("experts", 1.0),
        *travels("combine", 1),
        part("shared", 1.0),
        Event("fence"),
    ]
    second = [replace(e, transfer=e.transfer + 2) if e.transfer >= 0 else e for e in unit]
    assert duration(best_order([*unit, *second]), [1.0, 5.0] * 2) == pytest.approx(2 * (1 + 1 + 5))


def test_the_median_of_runs_is_taken_event_by_event():
    runs = [[part("attention", a), part("experts", b)] for a, b in ((1, 9), (3, 5), (2, 7))]
    assert [event.seconds for event in median_events(runs)] == [2, 7]
    with pytest.raises(AssertionError, match="order of work differs"):
        median_events([runs[0], runs[1][::-1]])
