"""Ctrl-C in the first seconds, and places that cannot be written: one line and the documented exit code."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sidestream.commands import shared
from sidestream.config.errors import ConfigError
from sidestream.launch import failures
from sidestream.launch.failures import Failure
from tests.docs.pages import REPOSITORY, script

SCRIPTS = sorted(
    f"{folder}/{path.name}" for folder in ("scripts", "tools") for path in (REPOSITORY / folder).glob("*.py")
)
COMMANDS = ["train.py", "eval.py", "predict.py", *SCRIPTS]
OF_HYDRA = ("train.py", "predict.py", "scripts/measure_overlap.py")

# Sends Ctrl-C at the moment at which a module is imported, or a file is opened, by a process in whatever state it is.
STRIKES = """
import os, signal, sys
at = os.environ["STRIKES_AT"]
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in at.split():
            os.kill(os.getpid(), signal.SIGINT)
def hook(event, what):
    if event == "open" and str(what[0]).endswith("/" + at):
        os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.addaudithook(hook)
"""


@pytest.fixture
def interrupted(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(STRIKES)

    def run(command: str, at: str) -> subprocess.Popen:
        path = os.pathsep.join([str(tmp_path), str(REPOSITORY / "src")])
        return subprocess.Popen(
            [sys.executable, str(REPOSITORY / command)],
            env={**os.environ, "PYTHONPATH": path, "STRIKES_AT": at},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return run


def outcome(process: subprocess.Popen) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, out, err.strip()


def test_during_imports_every_command_ends_with_one_line(interrupted):
    started = {
        command: interrupted(command, "hydra torch matplotlib sidestream.commands.shared")
        for command in COMMANDS
    }
    ended = {command: outcome(process) for command, process in started.items()}
    assert ended == dict.fromkeys(COMMANDS, (130, "", "error: interrupted"))


@pytest.mark.parametrize("command", ["train.py", "predict.py"])
def test_while_it_composes_too(interrupted, command: str):
    file = f"conf/{Path(command).stem}.yaml"
    code, _, error = outcome(interrupted(command, file))
    assert (code, error) == (130, "error: interrupted")


def raising(error: BaseException):
    def main() -> int:
        raise error

    return main


@pytest.mark.parametrize(
    ("main", "code", "line"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGINT), 130, "error: interrupted"),
        (
            raising(ConfigError("a", 1, "wrong", expected="2", fix="a=2")),
            2,
            "error: a=1: wrong; expected 2; set a=2",
        ),
        (raising(PermissionError(13, "Permission denied", "/x/y")), 2, "error: /x/y: Permission denied"),
        (raising(OSError(28, "No space left on device")), 2, "error: No space left on device"),
        (lambda: 1, 1, ""),
    ],
)
def test_a_script_ends_with_one_line(main, code: int, line: str, capsys: pytest.CaptureFixture):
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as end:
            shared.run(main)
    finally:
        signal.signal(signal.SIGINT, before)
    assert end.value.code == code
    assert capsys.readouterr().err.strip() == line


def test_a_mistake_of_ours_keeps_its_traceback():
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(ConnectionResetError):
            shared.run(raising(ConnectionResetError(104, "reset")))
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("name", "argv"),
    [
        ("bench_layer", ["--out", "{}"]),
        ("bench_graph", ["--out", "{}"]),
        ("bench_dispatch", ["--out", "{}"]),
        ("check_gpu", ["--json", "{}"]),
        ("doctor", ["--json", "{}"]),
        ("overlap_cost", ["--out", "{}"]),
    ],
)
def test_a_place_is_tried_before_minutes_of_measuring(name: str, argv: list[str], tmp_path: Path):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "x.json", tmp_path):
        with pytest.raises(OSError) as error:
            script(f"scripts/{name}.py").main([word.format(place) for word in argv])
        assert error.value.filename is not None


def test_a_run_folder_that_vanishes_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture):
    gone = tmp_path / "run"
    failure = failures.record(
        gone, rank=0, error=FileNotFoundError(2, "No such file", str(gone / "metrics.jsonl"))
    )
    assert not gone.exists()
    assert failures.report(gone, failure, world_size=2) == 1
    told = capsys.readouterr()
    assert told == ("", f"error: the run folder was removed while the run wrote in it: {gone}\n")


def test_a_full_disk_is_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture):
    failure = failures.record(tmp_path, rank=1, error=OSError(28, "No space left on device"))
    assert failures.report(tmp_path, failure, world_size=2) == 1
    assert capsys.readouterr().err == "error: rank 1: OSError: [Errno 28] No space left on device\n"
    assert "Traceback" not in failure.traceback and isinstance(failure, Failure)
