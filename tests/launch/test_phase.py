"""The phase that a rank says is what its watcher reads, whatever has become of the rank."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidestream.launch import phase

pytestmark = pytest.mark.timeout(30)


@pytest.fixture(autouse=True)
def in_memory_afterwards() -> Iterator[None]:
    yield
    phase.open_file(None, 0)
    phase.enter(phase.STARTING)


def test_a_phase_is_read_by_another_process_also_after_death(tmp_path: Path):
    code = (
        "from pathlib import Path; import os, sys; from sidestream.launch import phase\n"
        "phase.open_file(Path(sys.argv[1]), 1); phase.set_timeout(7); phase.enter(phase.TRAINING, step=12)\n"
        "phase.beat('dispatch'); phase.beat(); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=20)
    assert done.returncode == -9
    seen = phase.read(tmp_path, 1)
    assert (seen.name, seen.step, seen.doing, seen.timeout) == (phase.TRAINING, 12, "dispatch", 7.0)
    assert seen.limit == 7.0 + phase.GRACE
    assert str(seen) == "training step 12 (dispatch)"


def test_every_call_is_a_sign_of_life(tmp_path: Path):
    phase.open_file(tmp_path, 0)
    beats = [phase.read(tmp_path, 0).beats]
    for call in (
        lambda: phase.enter(phase.READING),
        lambda: phase.beat("a file"),
        phase.beat,
        lambda: phase.beat("a file"),
        lambda: phase.enter(phase.VALIDATING, step=4),
    ):
        call()
        beats.append(phase.read(tmp_path, 0).beats)
    assert beats == sorted(set(beats))
    assert phase.current() == phase.read(tmp_path, 0)
    assert str(phase.current()) == "validating at step 4"


def test_a_rank_that_said_nothing_yet_is_starting(tmp_path: Path):
    assert phase.read(tmp_path, 0) == phase.Phase()
    (tmp_path / "phase0").write_bytes(b"x")
    assert str(phase.read(tmp_path, 0)) == "starting"


def test_without_a_folder_nothing_fails(tmp_path: Path):
    for folder in (None, tmp_path / "gone"):
        phase.open_file(folder, 0)
        phase.enter(phase.SAVING, step=3)
        assert phase.current().name == phase.SAVING
    long = "x" * 500 + "ü" * 99
    phase.open_file(tmp_path, 0)
    phase.beat(long)
    assert phase.read(tmp_path, 0).doing == long[:96]


def test_ranks_find_each_other_only_where_they_share_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(phase.SCRATCH, raising=False)
    assert phase.others(2) == {}
    monkeypatch.setenv(phase.SCRATCH, os.fspath(tmp_path))
    assert set(phase.others(2)) == {0, 1}
