"""`latest`: which run or sweep it is, wherever one is named."""

import os
import sys
from pathlib import Path

import pytest

from sidestream.config.errors import ConfigError
from sidestream.launch import arguments
from sidestream.tracking import latest
from tests.docs.pages import script


def make(root: Path, place: str, mark: str = ".hydra/launch.json") -> Path:
    file = root / place / mark
    file.parent.mkdir(parents=True)
    file.touch()
    return root / place


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    make(Path("logs"), "train/runs/2026-11-30/23-59-59-999999")
    make(Path("logs"), "study/runs/2026-12-01/09-00-00-000001")
    make(Path("logs"), "train/runs/2026-12-01/08-00-00-000000")
    (Path("logs") / "train/runs/2026-12-02/00-00-00-000000").mkdir(parents=True)  # nothing was started in it
    make(Path("logs"), "measure_overlap/runs/2026-12-03/00-00-00-000000")
    make(Path("logs"), "predict/runs/2026-12-03/00-00-00-000000")
    make(Path("logs"), "train/multiruns/2026-12-01/10-00-00-000000", "multirun.yaml")
    make(Path("logs"), "train/multiruns/2026-12-01/09-00-00-000000", "multirun.yaml")
    make(Path("logs"), "train/multiruns/2026-12-01/10-00-00-000000/0-seed-1")
    return tmp_path / "logs"


def test_it_is_the_run_that_was_started_last(logs: Path, capsys: pytest.CaptureFixture):
    assert latest.run("latest", key="resume") == Path("logs/study/runs/2026-12-01/09-00-00-000001")
    assert capsys.readouterr() == ("", "resume=latest: logs/study/runs/2026-12-01/09-00-00-000001\n")
    assert latest.sweep("latest") == Path("logs/train/multiruns/2026-12-01/10-00-00-000000")


def test_a_run_that_was_touched_later_was_not_started_later(logs: Path):
    os.utime(logs / "train/runs/2026-11-30/23-59-59-999999/.hydra/launch.json", (2e9, 2e9))
    assert latest.run("latest").name == "09-00-00-000001"


def test_a_run_with_a_name_of_its_own_counts_by_its_first_file(logs: Path):
    mine = make(logs, "train/runs/mine/first")
    os.utime(mine / ".hydra/launch.json", (2e9, 2e9))
    assert latest.run("latest").name == "first"


def test_a_measurement_finds_measurements(logs: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["scripts/measure_overlap.py"])
    assert latest.run("latest").parts[1] == "measure_overlap"


def test_another_log_folder_may_be_named(logs: Path, tmp_path: Path):
    other = make(tmp_path / "scratch", "train/runs/2020-01-01/00-00-00-000000")
    assert latest.run(tmp_path / "scratch" / "latest") == other
    words = arguments.with_latest([f"paths.log_dir={tmp_path / 'scratch'}", "resume=latest", "seed=1"])
    assert words[1:] == [f"resume='{other}'", "seed=1"]


def test_a_folder_of_that_name_is_a_folder(logs: Path, tmp_path: Path):
    (tmp_path / "latest").mkdir()
    assert latest.run("latest") == Path("latest")
    assert latest.run(logs / "train") == logs / "train"


def test_without_any_it_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"resume=latest: no run below logs; .*set resume=<run>"):
        arguments.with_latest(["resume=latest"])
    with pytest.raises(ConfigError, match="resume_sweep=latest: no sweep below logs"):
        arguments.with_latest(["resume_sweep=latest"])


def test_the_command_line_gets_folders(logs: Path):
    newest = "logs/study/runs/2026-12-01/09-00-00-000001"
    sweep = "logs/train/multiruns/2026-12-01/10-00-00-000000"
    assert arguments.with_latest(["resume=latest", "a=latest"]) == [f"resume='{newest}'", "a=latest"]
    assert arguments.with_latest(["resume_sweep=latest"]) == [f"resume_sweep='{sweep}'"]
    assert arguments.with_latest(["resume=null", "seed=1"]) == ["resume=null", "seed=1"]
    with pytest.raises(ConfigError, match="the newest run has no checkpoint"):
        arguments.with_latest(["initial_weights=latest"])
    (Path(newest) / "checkpoints" / "step-00000008").mkdir(parents=True)
    weights = f"initial_weights='{newest}/checkpoints/step-00000008'"
    assert arguments.with_latest(["initial_weights=latest"]) == [weights]


@pytest.mark.parametrize(
    ("name", "argv"),
    [
        ("scripts/plot_loss.py", ["latest", "--out", "x.png"]),
        ("scripts/plot_load.py", ["latest"]),
        ("scripts/compare.py", ["latest"]),
        ("tools/render_readme.py", ["--run", "latest"]),
    ],
)
def test_scripts_take_it(name: str, argv: list[str], logs: Path, capsys: pytest.CaptureFixture):
    assert script(name).main(argv) == 2  # the run is empty
    found = "train/multiruns/2026-12-01/10-00-00-000000" if "compare" in name else "study/runs/2026-12-01"
    assert found in capsys.readouterr().err.splitlines()[0]


def test_eval_takes_it(logs: Path, capsys: pytest.CaptureFixture):
    with pytest.raises(ConfigError, match="study/runs/2026-12-01"):
        script("eval.py").main(["run=latest"])
