"""What is said while nothing else is shown: when, how often, and that it never stays on a terminal."""

import io
import itertools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from sidestream.launch import phase, status
from sidestream.launch.phase import Phase
from sidestream.launch.status import AGAIN, FIRST, MINUTE, Status
from sidestream.lightning import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Played:
    """A status line under a clock of its own, redrawn ten times a second."""

    def __init__(self, stream: io.StringIO | None = None) -> None:
        self.now, self.stream = 0.0, stream or io.StringIO()
        self.status = Status(self.stream, started=0.0, clock=lambda: self.now)
        self.lines: list[tuple[float, str]] = []

    def pass_(self, seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            self.now = round(self.now + 0.1, 1)
            before = len(self.stream.getvalue())
            self.status.draw()
            self.lines += [(self.now, line) for line in self.stream.getvalue()[before:].splitlines()]

    def say(self, doing: str) -> None:
        self.status.follow(lambda: doing)


def test_what_ends_within_a_second_says_nothing():
    played = Played()
    played.say("composing")
    played.pass_(FIRST - 0.1)
    played.status.close()
    assert played.stream.getvalue() == ""


def test_the_first_minute_has_no_three_silent_seconds():
    played = Played()
    for doing, seconds in [
        ("composing", 0.7),
        ("starting", 0.2),
        ("torch", 11.0),
        ("data", 40.0),
        ("model", 4.1),
    ]:
        played.say(doing)
        played.pass_(seconds)
    times = [0.0, *(time for time, _ in played.lines)]
    assert times[1] <= 1.5
    assert max(b - a for a, b in itertools.pairwise(times)) < 3.0
    assert {line.split()[0] for _, line in played.lines} >= {"torch", "data", "model"}
    assert played.lines[-1][1].endswith(" s)")


def test_later_it_is_said_ever_less_often():
    played = Played()
    played.say("training step 1")
    played.pass_(MINUTE)
    in_a_minute = len(played.lines)
    played.pass_(10 * MINUTE)
    assert len(played.lines) - in_a_minute <= 15


def test_a_count_that_goes_on_is_nothing_new():
    played = Played()
    for number in range(100):
        played.say(f"validating batch {number} of 100")
        played.pass_(0.1)
    times = [time for time, _ in played.lines]
    assert times[0] == FIRST and min(b - a for a, b in itertools.pairwise(times)) >= AGAIN - 0.05


def test_a_terminal_has_one_line_that_goes_away():
    played = Played(Terminal())
    played.say("importing torch " + 200 * "x")
    played.pass_(0.3)
    text = played.stream.getvalue()
    assert "\n" not in text and text.endswith("\r")  # whoever prints next writes over it
    assert max(len(part.strip("\r")) for part in text.split("\x1b[K")) < 80
    played.status.line("a line that stays")
    played.status.close()
    assert played.stream.getvalue().endswith("\r\x1b[Ka line that stays\n\r\x1b[K")


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "dumb")
    assert not Status(Terminal(), started=0.0).live


def test_a_closed_stream_is_no_reason_to_fail():
    played = Played()
    played.say("reading")
    played.stream.close()
    played.now = 5.0
    played.status.draw()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str | None]:
    monkeypatch.setattr(status.time, "monotonic", lambda: 100.0)
    return lambda *phases: status.of_ranks(phases)


def test_ranks_are_shown_by_the_one_that_is_behind(ranks: Callable[..., str | None]):
    reading, importing = Phase(phase.READING), Phase(doing="importing torch")
    assert ranks(reading, reading) == "2 ranks: reading the data"
    assert ranks(reading) == "reading the data"
    assert ranks(importing, importing) == "2 ranks: importing torch"
    assert ranks(reading, importing) == "rank 1: importing torch"


def test_what_rank_0_shows_itself_is_left_to_it_unless_it_takes_long(ranks: Callable[..., str | None]):
    step = Phase(phase.TRAINING, step=3, entered=99.0)
    assert ranks(step, step) is None
    assert ranks(replace(step, entered=97.0), step) == "training step 3"
    assert ranks(Phase(phase.VALIDATING, step=3, entered=90.0)) == "validating at step 3"
    assert ranks(Phase(phase.LEAVING, entered=90.0)) is None


def test_long_steps_have_lines_of_their_own_in_the_first_minute(monkeypatch: pytest.MonkeyPatch):
    now, out = [0.0], io.StringIO()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    bar = progress.RichProgress(rank=0, log_every_n_steps=50, patience=AGAIN, console=Console(file=out))
    for step in range(1, 61):
        now[0] += 2.0
        bar.show(step, {})
    steps = [int(line.split()[1].split("/")[0]) for line in out.getvalue().splitlines()]
    assert steps == [*range(2, 31, 2), 50]


def test_a_bar_shows_how_far_a_validation_is(monkeypatch: pytest.MonkeyPatch):
    now, out = [0.0], Terminal()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    console = Console(file=out, width=80, force_terminal=True, color_system=None)
    bar = progress.RichProgress(rank=0, log_every_n_steps=50, console=console)
    bar.on_train_start(SimpleNamespace(max_steps=10), None)
    now[0] = 1.0
    bar.on_validation_batch_end(SimpleNamespace(num_val_batches=[16]), None, None, None, 2)
    bar.on_train_end(None, None)
    assert "validating 3/16" in out.getvalue()
