import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sidestream.tracking import folder as folder_module
from sidestream.tracking.folder import RunFolder, code_state, write_json_atomic, write_text_atomic


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failure_before_the_rename_leaves_the_old_file(tmp_path, monkeypatch, failing):
    path = tmp_path / "result.json"
    write_text_atomic(path, "old")

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(*{"fsync": (os, "fsync", fail), "replace": (Path, "replace", fail)}[failing])
    with pytest.raises(OSError, match="disk full"):
        write_text_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["result.json"]


def test_a_kill_between_write_and_rename_leaves_the_old_file(tmp_path):
    path = tmp_path / "result.json"
    write_text_atomic(path, "old")
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from sidestream.tracking.folder import write_text_atomic\n"
        "Path.replace = lambda self, target: os._exit(9)\n"
        f"write_text_atomic({str(path)!r}, 'new')\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 9
    assert path.read_text() == "old"


def test_the_content_is_on_disk_before_the_rename(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append("fsync"), fsync(fd)))
    monkeypatch.setattr(Path, "replace", lambda *a: (events.append("rename"), replace(*a)))
    write_text_atomic(tmp_path / "x", "new")
    assert events == ["fsync", "rename", "fsync"]


def test_a_written_file_follows_the_umask(tmp_path):
    write_text_atomic(tmp_path / "x", "new")
    (tmp_path / "y").write_text("plain")
    assert (tmp_path / "x").stat().st_mode == (tmp_path / "y").stat().st_mode


@dataclasses.dataclass
class Point:
    x: float
    where: Path


def test_json_forms(tmp_path):
    numpy = pytest.importorskip("numpy")
    content = {
        "bad": [float("nan"), float("inf"), -float("inf"), numpy.float32("nan")],
        "point": Point(1.5, Path("a/b")),
        "numbers": (True, numpy.int64(3), numpy.float32(0.5)),
        "none": None,
    }
    write_json_atomic(tmp_path / "x.json", content)
    assert json.loads((tmp_path / "x.json").read_text(), parse_constant=pytest.fail) == {
        "bad": [None] * 4,
        "point": {"x": 1.5, "where": "a/b"},
        "numbers": [True, 3, 0.5],
        "none": None,
    }


@pytest.mark.parametrize("value", [{1: 2}, {1, 2}, object(), b"x", Point])
def test_what_json_cannot_hold_is_refused_and_the_old_file_stays(tmp_path, value):
    write_json_atomic(tmp_path / "x.json", "old")
    with pytest.raises(TypeError):
        write_json_atomic(tmp_path / "x.json", {"value": value})
    assert json.loads((tmp_path / "x.json").read_text()) == "old"


def test_metrics_come_back_in_order_and_survive_a_broken_last_line(tmp_path):
    run = RunFolder(tmp_path / "a" / "run")
    assert run.read_metrics() == []
    run.append_metrics({"step": 1, "train/loss": 2.5})
    run.append_metrics({"step": 2, "train/loss": float("nan")})
    with run.metrics_path.open("ab") as file:
        file.write(b'{"step": 3, "train/lo')
    two = [{"step": 1, "train/loss": 2.5}, {"step": 2, "train/loss": None}]
    assert run.read_metrics() == two
    run.append_metrics({"step": 3})
    assert run.read_metrics() == [*two, {"step": 3}]


def test_a_first_line_that_broke_is_dropped(tmp_path):
    run = RunFolder(tmp_path)
    run.metrics_path.write_bytes(b'{"step"')
    assert run.read_metrics() == []
    run.append_metrics({"step": 1})
    assert run.metrics_path.read_text() == '{"step": 1}\n'


def test_cut_drops_later_steps_and_what_a_crash_left(tmp_path):
    run = RunFolder(tmp_path)
    run.cut_metrics(3)
    assert not run.metrics_path.exists()
    for step in (1, 2, 2, 3, 4):
        run.append_metrics({"step": step})
    with run.metrics_path.open("ab") as file:
        file.write(b'{"step": 5')
    run.cut_metrics(2)
    assert [record["step"] for record in run.read_metrics()] == [1, 2, 2]
    run.append_metrics({"step": 3})
    assert [record["step"] for record in run.read_metrics()] == [1, 2, 2, 3]


def test_env_names_versions_and_the_environment_that_matters(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_LOGS", "+dynamo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("WANDB_API_KEY", "TORCH_HUB_TOKEN", "TORCH_", "NCCL_SECRET"):
        monkeypatch.setenv(name, "secret")
    run = RunFolder(tmp_path)
    run.write_env(command=["train.py", "seed=1"])
    env = json.loads(run.env_path.read_text())
    assert env["command"] == ["train.py", "seed=1"]
    assert env["versions"]["hydra-core"].startswith("1.3")
    assert env["environment"]["TORCH_LOGS"] == "+dynamo"
    assert env["environment"]["OMP_NUM_THREADS"] == "1"
    assert env["cpu_count"] >= 1
    assert "secret" not in run.env_path.read_text()
    # No host name, no user: run folders get shared.
    assert set(env) == {
        "started",
        "command",
        "python",
        "platform",
        "cpu",
        "cpu_count",
        "versions",
        "commit",
        "dirty",
        "environment",
        "previous",
    }


def test_a_resume_keeps_the_env_of_earlier_starts(tmp_path):
    run = RunFolder(tmp_path)
    for seed in range(3):
        run.write_env(command=["train.py", f"seed={seed}"])
    env = json.loads(run.env_path.read_text())
    assert env["command"] == ["train.py", "seed=2"]
    assert [earlier["command"][1] for earlier in env["previous"]] == ["seed=0", "seed=1"]


def test_a_repository_that_does_not_track_the_code_has_no_commit(tmp_path, monkeypatch):
    def git(*arguments):
        command = ["git", "-c", "user.name=x", "-c", "user.email=x@y", *arguments]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

    code = tmp_path / "folder.py"
    code.write_text("1")
    monkeypatch.setattr(folder_module, "__file__", str(code))
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "empty")
    assert code_state() == (None, None)
    git("add", "folder.py")
    git("commit", "-q", "-m", "code")
    commit, dirty = code_state()
    assert len(commit) == 40
    assert dirty is False
    code.write_text("2")
    assert code_state() == (commit, True)


def test_no_git_means_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert code_state() == (None, None)


def test_importing_tracking_brings_in_neither_torch_nor_lightning():
    code = (
        "import sys, sidestream.tracking.folder, sidestream.tracking.result\n"
        "sys.exit(len({'torch', 'lightning', 'numpy', 'wandb'} & sys.modules.keys()))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0
