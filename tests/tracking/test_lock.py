"""A run folder has one owner, and none once that process has ended."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sidestream.config.errors import ConfigError
from sidestream.config.layout import Layout
from sidestream.launch import resume
from sidestream.launch.record import Launch
from sidestream.tracking import lock

OTHER = """
import sys
from pathlib import Path
from sidestream.tracking import lock
lock.hold(Path(sys.argv[1]), key="resume")
print("held", flush=True)
sys.stdin.read()
"""

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / ".hydra").mkdir()
    return tmp_path


def release(run: Path) -> None:
    os.close(lock._held.pop(run.resolve()))


def test_a_second_process_is_refused_and_told_who_holds_it(run: Path):
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=rf"^resume=.*: process {process.pid} on .*, since 20\d\d-"):
            lock.hold(run, key="resume")
        Launch("", [], [], {}, Layout(2, 2, 2, 1, 4, 1, "cpu")).save(run)
        with pytest.raises(
            ConfigError, match=f"process {process.pid} on "
        ):  # also before its first checkpoint
            resume.rewrite([f"resume={run}"])
        process.send_signal(signal.SIGKILL)  # nothing is cleaned up
        process.wait(timeout=20)
    finally:
        process.kill()
        process.wait(timeout=20)
    assert lock.owner_of(run) is None
    lock.hold(run, key="resume")
    lock.hold(run, key="resume")  # its own
    assert lock.owner_of(run) is None
    release(run)


def test_where_there_are_no_locks_a_living_process_is_asked_for(run: Path, monkeypatch: pytest.MonkeyPatch):
    import fcntl

    def missing(*arguments: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", missing)
    lock.hold(run, key="resume")
    release(run)
    owner = (run / lock.OWNER).read_text()
    with_parent = owner.replace(f'"pid": {os.getpid()}', f'"pid": {os.getppid()}')
    assert with_parent != owner
    (run / lock.OWNER).write_text(with_parent)
    with pytest.raises(ConfigError, match=f"process {os.getppid()} on "):
        lock.hold(run, key="resume")
    (run / lock.OWNER).write_text("{")  # whatever is there
    lock.hold(run, key="resume")
    release(run)


def test_a_link_is_not_followed(run: Path, tmp_path_factory: pytest.TempPathFactory):
    target = tmp_path_factory.mktemp("other") / "target"
    (run / lock.LOCK).symlink_to(target)
    with pytest.raises(ConfigError, match="cannot be locked"):
        lock.hold(run, key="resume")
    assert not target.exists()
