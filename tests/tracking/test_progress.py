import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from sidestream.lightning import progress
from sidestream.lightning.progress import RichProgress

METRICS = {"train/loss": 2.5, "perf/tokens_per_sec": 8200.0, "moe/max_over_mean": 1.25}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def start(bar, max_steps=40):
    bar.show_start(
        choices={"model": "tiny", "dispatcher": "alltoall", "router": "softmax", "paths": "default"},
        world_size=2,
        expert_parallel_size=2,
        transport="torch",
        params_total=1_234_567,
        params_active=987_654,
        data_name="python_source",
        baselines={"bigram": 2.49, "trigram": 1.89},
        folder=Path("logs/[x]/run"),
    )
    bar.on_train_start(SimpleNamespace(max_steps=max_steps), None)


@pytest.fixture
def clock(monkeypatch):
    times = SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: times.now)
    return times


def test_a_file_gets_one_line_per_log_step_and_validation(clock, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = io.StringIO()
    bar = RichProgress(rank=0, log_every_n_steps=20, console=Console(file=out))
    start(bar)
    begin = out.getvalue()
    assert "tiny: 1.23M parameters, 988k active" in begin
    assert "bigram 2.490, trigram 1.890 nats/byte" in begin
    assert "2, expert parallel 2, dispatcher=alltoall (torch)" in begin
    assert "router=softmax" in begin
    for step in range(1, 41):
        clock.now += 2.0
        bar.show(step, METRICS if step % 10 == 0 else {})
        if step == 20:
            clock.now += 100.0
            bar.show_validation(step, 2.6789)
    bar.on_train_end(None, None)
    bar.show_end(val_loss=1.6842, folder=Path("logs/[x]/run"))
    assert out.getvalue()[len(begin) :].splitlines() == [
        "step 20/40  loss 2.500  tok/s 8.20k  load 1.25  eta 0:40",
        "step 20/40  val loss 2.6789 nats/byte",
        "step 40/40  loss 2.500  tok/s 8.20k  load 1.25  eta 0:00",
        "val loss 1.6842 nats/byte  (bigram 2.490, trigram 1.890)",
        "logs/[x]/run",
    ]


def test_the_last_step_is_shown_and_a_resume_counts_its_own_pace(clock):
    out = io.StringIO()
    bar = RichProgress(rank=0, log_every_n_steps=10, console=Console(file=out))
    bar.on_train_start(SimpleNamespace(max_steps=1015), None)
    for step in range(1001, 1016):
        clock.now += 60.0
        bar.show(step, METRICS)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("step 1010/1015")
    assert lines[0].endswith("eta 5:00")
    assert lines[1].startswith("step 1015/1015")
    assert len(lines) == 2


def test_a_terminal_gets_a_bar_of_one_line_in_80_columns(clock):
    out = Terminal()
    console = Console(file=out, width=80, force_terminal=True, color_system=None)
    bar = RichProgress(rank=0, log_every_n_steps=20, console=console)
    start(bar, max_steps=5000)
    for step in range(1, 201):
        clock.now += 1.0
        bar.show(step, METRICS)
    bar.show_validation(200, 2.6789)
    bar.on_exception(None, None, KeyboardInterrupt())
    bar.on_train_end(None, None)
    lines = out.getvalue().replace("\r", "\n").splitlines()
    assert max(len(line) for line in lines if "\x1b" not in line) <= 80
    final = [line for line in lines if "200/5000" in line][-1]
    assert "loss 2.500  val 2.679  tok/s 8.20k  load 1.25  eta 1:20:00" in final
    assert out.getvalue().rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_redraws_are_limited_but_the_last_state_is_drawn(clock):
    out = Terminal()
    console = Console(file=out, width=80, force_terminal=True, color_system=None)
    bar = RichProgress(rank=0, log_every_n_steps=1, console=console)
    start(bar, max_steps=1000)
    for step in range(1, 301):
        clock.now += 0.01
        bar.show(step, METRICS)
    bar.on_train_end(None, None)
    assert out.getvalue().count("/1000") < 25
    assert "300/1000" in out.getvalue()


@pytest.mark.parametrize(("rank", "enabled"), [(1, True), (0, False)])
def test_other_ranks_and_a_disabled_bar_print_nothing(rank, enabled):
    out = Terminal()
    console = Console(file=out, force_terminal=True)
    bar = RichProgress(rank=rank, log_every_n_steps=1, enabled=enabled, console=console)
    start(bar)
    bar.show(1, METRICS)
    bar.show_validation(1, 2.0)
    bar.on_train_end(None, None)
    bar.show_end(val_loss=2.0, folder=Path("x"))
    assert out.getvalue() == ""
