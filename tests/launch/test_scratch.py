"""Temporary folders: those of dead owners go at the next start, those of living ones never."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sidestream.launch import scratch

pytestmark = pytest.mark.timeout(30)

HOLDER = """
import sys
from sidestream.launch.scratch import scratch
with scratch() as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(scratch.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def _hold(place: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        env={**os.environ, "TMPDIR": str(place)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_the_folder_of_a_killed_process_is_gone_after_the_next_start(place: Path):
    process, folder = _hold(place)
    try:
        scratch.clean()
        assert folder.is_dir(), "its process lives"
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=20)
        assert folder.is_dir()
        with scratch.scratch() as mine:
            assert not folder.exists()
            scratch.clean()
            assert mine.is_dir(), "a process does not take its own for abandoned"
        assert list(place.iterdir()) == []
    finally:
        process.kill()
        process.communicate()


def test_folders_of_nobody_go_after_a_day_and_other_things_stay(place: Path):
    old, young, file = place / "sidestream-old", place / "sidestream-young", place / "sidestream-file"
    for folder in (old, young, place / "other"):
        folder.mkdir()
    file.touch()
    link = place / "sidestream-link"
    link.symlink_to(place / "other")
    long_ago = time.time() - 3 * 24 * 3600
    for path in (old, file, place / "other"):
        os.utime(path, (long_ago, long_ago))
    scratch.clean()
    assert sorted(path.name for path in place.iterdir()) == sorted(
        ["other", "sidestream-file", "sidestream-link", "sidestream-young"]
    )
