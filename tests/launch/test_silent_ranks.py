"""A rank that gives no sign of life ends the job within the limit of its phase, and is named. On a clock of our own."""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sidestream.launch import failures, phase, processes, silence, stopping, supervisor
from sidestream.launch.phase import Phase
from sidestream.measure import ranks

TIMEOUT = 20.0
STOP, WORK = silence.Process(1.0, True), silence.Process(1.0, False)


class Fake(subprocess.Popen):
    """A rank: where it is, and when it ends; told by the test."""

    def __init__(self, number: int) -> None:
        self.pid, self.ends, self.code, self.got = 10_000 + number, float("inf"), 0, []

    def poll(self) -> int | None:
        self.returncode = self.code if self.ends <= CLOCK.now else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        self.got.append(number)

    def __del__(self) -> None:
        pass


CLOCK = SimpleNamespace(now=0.0)


def _sleep(seconds: float) -> None:
    CLOCK.now += seconds


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """Two ranks that train and are watched by `until_the_end`."""
    CLOCK.now = 1000.0
    time = SimpleNamespace(monotonic=lambda: CLOCK.now, sleep=_sleep, time=lambda: CLOCK.now)
    for module in (supervisor, silence, stopping, processes):
        monkeypatch.setattr(module, "time", time)
    fakes = [Fake(0), Fake(1)]
    phases = [Phase(phase.TRAINING, 7, "", 1, 1.0, TIMEOUT)] * 2
    system: dict[int, Any] = {fake.pid: WORK for fake in fakes}
    hooks: list[Any] = []

    def read(scratch: Path, rank: int) -> Phase:
        for hook in hooks:
            hook()
        return phases[rank]

    def kill(process: Fake) -> None:
        process.returncode = process.poll()
        if process.returncode is None:
            process.returncode = -9

    monkeypatch.setattr(phase, "read", read)
    monkeypatch.setattr(silence, "look_at", lambda pid: system.get(pid))
    monkeypatch.setattr(supervisor, "kill_group", kill)
    ranks = [supervisor.RankProcess(number, fake) for number, fake in enumerate(fakes)]
    signals = processes.Signals()

    def run() -> str:
        began = CLOCK.now
        supervisor._Watch(tmp_path, ranks, signals, tmp_path).until_the_end()
        result.seconds = CLOCK.now - began
        result.code = supervisor._conclude(tmp_path, ranks, signals, debug=False)
        written = supervisor.failures.RunFolder(tmp_path).read_result()
        return "" if written is None else written["error"] or ""

    result = SimpleNamespace(
        fakes=fakes,
        phases=phases,
        system=system,
        ranks=ranks,
        signals=signals,
        run=run,
        hooks=hooks,
        folder=tmp_path,
    )
    return result


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        (phase.STARTING, 120.0),
        (phase.READING, 600.0),
        (phase.MEETING, TIMEOUT + phase.GRACE),
        (phase.TRAINING, TIMEOUT + phase.GRACE),
        (phase.VALIDATING, TIMEOUT + phase.GRACE),
        (phase.SAVING, TIMEOUT + phase.GRACE),
        (phase.FINISHING, TIMEOUT + phase.GRACE),
        (phase.LEAVING, 30.0),
    ],
)
def test_a_stopped_rank_ends_the_job_in_every_phase(job: SimpleNamespace, name: str, limit: float):
    job.phases[:] = [Phase(name, 7, "", 1, 1.0, TIMEOUT)] * 2
    job.system[job.fakes[1].pid] = STOP
    error = job.run()
    assert job.code == 1
    assert limit < job.seconds < limit + 3
    assert error.startswith("rank 1: stopped by a signal for ")
    assert name in error


def test_a_rank_that_hangs_is_told_from_those_that_wait_for_it(job: SimpleNamespace):
    job.phases[0] = Phase(phase.TRAINING, 7, "dispatch", 31, 1.0, TIMEOUT)
    job.phases[1] = Phase(phase.TRAINING, 7, "combine", 30, 1.0, TIMEOUT)
    assert job.run().startswith("rank 1: no sign of life for ")


def test_the_others_have_a_limit_once_a_rank_has_ended(job: SimpleNamespace):
    job.phases[1] = Phase(phase.FINISHING, None, "", 9, 1.0, 3600.0)
    job.fakes[0].ends = CLOCK.now + 1
    error = job.run()
    assert job.seconds < silence.SECONDS_AFTER_END + 5
    assert (job.code, error.split(":")[0]) == (1, "rank 1")


@pytest.mark.parametrize("seconds", [9.0, 99.0])
def test_a_rank_that_was_asked_to_stop_is_why_the_others_lost_it(job: SimpleNamespace, seconds: float):
    """It takes its time to leave, and closes its connections at the beginning of that."""
    job.phases[1] = Phase(phase.LEAVING, None, "", 9, 1.0, TIMEOUT)
    job.fakes[1].ends, job.fakes[1].code = CLOCK.now + seconds, 130
    failures.record(job.folder, rank=0, error=RuntimeError("Connection closed by peer [127.0.0.1]:47318"))
    job.fakes[0].ends, job.fakes[0].code = CLOCK.now, 1
    job.run()
    assert job.code == (130 if seconds < supervisor.SECONDS_TO_LEAVE else 1)
    assert job.seconds < supervisor.SECONDS_TO_LEAVE + 5


def test_a_rank_that_spins_while_it_leaves_has_a_limit_too(job: SimpleNamespace):
    job.phases[1] = Phase(phase.LEAVING, None, "", 9, 1.0, TIMEOUT)
    job.fakes[0].ends = CLOCK.now + 1
    job.hooks.append(lambda: job.system.update({job.fakes[1].pid: silence.Process(CLOCK.now, False)}))
    assert "leaving" in job.run()
    assert job.seconds < 3 * silence.SECONDS_AFTER_END


@pytest.mark.parametrize("sign", ["cpu", "beats"])
@pytest.mark.full
def test_long_work_is_no_silence(job: SimpleNamespace, sign: str):
    """An hour of reading on one rank, while the other sleeps until it may read what was built."""
    job.phases[:] = [Phase(phase.READING, None, "", 1, 1.0, TIMEOUT)] * 2
    for fake in job.fakes:
        fake.ends = CLOCK.now + 3600

    def works() -> None:
        if sign == "cpu":
            job.system[job.fakes[0].pid] = silence.Process(0.05 * CLOCK.now, False)
        else:
            job.phases[0] = Phase(phase.READING, None, "", int(CLOCK.now), 1.0, TIMEOUT)

    job.hooks.append(works)
    assert job.run() == ""
    assert job.code == 0


def test_time_in_which_nobody_watched_is_not_counted(job: SimpleNamespace):
    """The whole job was frozen and thawed."""
    for fake in job.fakes:
        fake.ends = CLOCK.now + 4000
    frozen = iter([False] * 20 + [True])

    def freezes() -> None:
        CLOCK.now += 3980 if next(frozen, False) else 0

    job.hooks.append(freezes)
    job.run()
    assert job.code == 0


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        (phase.STARTING, 4.0),
        (phase.TRAINING, 25.0),
        (phase.VALIDATING, 25.0),
        (phase.SAVING, TIMEOUT + phase.GRACE),
    ],
)
def test_a_rank_that_does_not_stop_when_asked_is_named(job: SimpleNamespace, name: str, limit: float):
    job.phases[:] = [Phase(name, 7, "", 1, 1.0, TIMEOUT)] * 2
    job.system[job.fakes[1].pid] = STOP
    job.signals.received.append(2)
    error = job.run()
    assert job.code == 130
    assert limit - 1 < job.seconds < limit + 3
    assert error == f"did not stop and was killed (rank 1 in: {job.phases[1]})"
    assert [fake.got[0] for fake in job.fakes] == [2, 2]


def test_a_long_checkpoint_is_waited_for_after_a_request(job: SimpleNamespace):
    job.signals.received.append(15)
    for fake in job.fakes:
        fake.ends, fake.code = CLOCK.now + 900, 143
    job.phases[:] = [Phase(phase.SAVING, 7, "", 1, 1.0, TIMEOUT)] * 2
    job.hooks.append(lambda: job.system.update({job.fakes[0].pid: silence.Process(CLOCK.now, False)}))
    job.run()
    assert job.code == 143
    assert not any(rank.killed for rank in job.ranks)


def test_a_second_request_ends_at_once(job: SimpleNamespace, capsys: pytest.CaptureFixture[str]):
    job.signals.received += [2, 2]
    assert job.run().startswith("stopped at once")
    assert (job.code, job.seconds < 1) == (130, True)
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "stopping after this step (once more: at once)"
    assert told[-1] == "interrupted; there is no checkpoint yet: start it again"


def test_a_rank_that_somebody_asked_takes_the_others_with_it(job: SimpleNamespace):
    """Before training it cannot tell them itself."""
    job.phases[:] = [Phase(phase.READING, None, "", 1, 1.0, TIMEOUT)] * 2
    job.fakes[1].ends, job.fakes[1].code = CLOCK.now + 1, 143
    job.run()
    assert job.fakes[0].got[0] == 15
    assert job.seconds < 8
    assert job.code == 143


def test_a_rank_that_does_not_listen_yet_is_not_sent_ctrl_c(job: SimpleNamespace):
    job.phases[1] = Phase()
    job.signals.received.append(2)
    job.run()
    assert job.fakes[1].got[0] == 15
    assert job.code == 130


def test_a_recorded_error_ends_the_others_before_its_process_has_ended(job: SimpleNamespace):
    failures.record(job.folder, rank=0, error=ValueError("a bug"))
    assert job.run() == "rank 0: ValueError: a bug"
    assert job.seconds < 5


@pytest.mark.parametrize("first", ["ended", "measures"])
@pytest.mark.parametrize("system", [STOP, WORK])
def test_a_silent_rank_of_a_measurement_is_named_and_ends_it(
    job: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, first: str, system: silence.Process
):
    monkeypatch.setattr(ranks, "time", supervisor.time)
    job.phases[:] = [Phase(phase.MEASURING, None, "", beats, 1.0, TIMEOUT) for beats in (7, 5)]
    job.system[job.fakes[1].pid] = system
    if first == "ended":
        job.fakes[0].ends = CLOCK.now + 1
        job.phases[1] = Phase(phase.LEAVING, None, "", 9, 1.0, TIMEOUT)
    for fake in job.fakes:
        fake.returncode = None
    began = CLOCK.now
    said = ranks._wait(job.fakes, job.folder)
    assert said.startswith(f"rank 1: {'stopped by a signal' if system is STOP else 'no sign of life'} for ")
    assert CLOCK.now - began < TIMEOUT + phase.GRACE + 5


def test_a_measurement_that_ends_is_not_given_up(job: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ranks, "time", supervisor.time)
    for fake in job.fakes:
        fake.ends, fake.returncode = CLOCK.now + 5, None
    assert ranks._wait(job.fakes, job.folder) == ""
