"""Jobs of a sweep side by side: cores of their own, and signals for all of them."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from sidestream.config.errors import ConfigError
from sidestream.launch import pool
from sidestream.launch.processes import Signals
from sidestream.tracking.sweep import Job

pytestmark = pytest.mark.timeout(120)

# Waits for a partner of its own number, so that jobs end only if two run at once.
MEETS = """
import os, sys, time
from pathlib import Path
number, here = int(sys.argv[1]), Path(sys.argv[2])
(here / f"here{number}").touch()
limit = time.monotonic() + 30
while not (here / f"here{number ^ 1}").exists() and time.monotonic() < limit:
    time.sleep(0.01)
assert time.monotonic() < limit
cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
(here / f"cores{number}").write_text(repr(cores))
"""
WAITS = """
import signal, sys, time
from pathlib import Path
got = []
signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
Path("ready" + sys.argv[1]).touch()
limit = time.monotonic() + 30
while not got and time.monotonic() < limit:
    time.sleep(0.01)
assert got
# One after the other: a place is free while the other still stops.
while sys.argv[1] == "1" and not Path("ended0").exists() and time.monotonic() < limit:
    time.sleep(0.01)
sys.exit(128 + got[0])
"""


def run_pool(
    folder: Path, count: int, *, code: str, cores: list[list[int]], signals: Signals, started=None
) -> list[Job]:
    jobs = [Job(n, folder / str(n), []) for n in range(count)]
    pool.run(
        jobs,
        command=lambda job: [sys.executable, "-S", "-c", code, str(job.number), str(folder)],
        cores=cores,
        signals=signals,
        started=started or (lambda job: None),
        ended=lambda job: (folder / f"ended{job.number}").touch(),
    )
    return jobs


def test_two_jobs_at_once_have_cores_of_their_own(tmp_path: Path):
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    cores = pool.shares(2) if len(pool.available_cores()) > 1 else [[], []]
    jobs = run_pool(tmp_path, 4, code=MEETS, cores=cores, signals=Signals())
    assert [job.code for job in jobs] == [0, 0, 0, 0]
    if before is None or len(before) < 2:
        pytest.skip("one core, or a system that pins nothing")
    used = [json.loads((tmp_path / f"cores{n}").read_text()) for n in (0, 1)]
    assert sorted(used) == sorted(cores)
    assert os.sched_getaffinity(0) == before


def test_a_single_job_may_use_all_cores(tmp_path: Path):
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("a system that pins nothing")
    (tmp_path / "here1").touch()
    run_pool(tmp_path, 1, code=MEETS, cores=[[0]], signals=Signals())
    assert json.loads((tmp_path / "cores0").read_text()) == sorted(os.sched_getaffinity(0))


def test_shares_of_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool, "available_cores", lambda: [1, 3, 5, 7, 9])
    assert pool.shares(1) == [[1, 3, 5, 7, 9]]
    assert pool.shares(2) == [[1, 3], [5, 7]]
    for count in (6, 0, -1):
        with pytest.raises(ConfigError, match=f"^hydra.launcher.max_concurrent={count}: .*from 1 to 5"):
            pool.shares(count)


def test_a_signal_reaches_every_job_that_runs_and_no_other_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    signals, running = Signals(), []

    def started(job: Job) -> None:
        running.append(job)
        while not Path(f"ready{job.number}").exists():
            time.sleep(0.01)
        if len(running) == 2:
            signals.received.append(signal.SIGTERM)

    jobs = run_pool(tmp_path, 3, code=WAITS, cores=[[0], [0]], signals=signals, started=started)
    assert [job.state for job in jobs] == ["interrupted", "interrupted", "not started"]
