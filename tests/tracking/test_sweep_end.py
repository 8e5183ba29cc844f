"""What a sweep leaves behind after its last job: the report, and one table in wandb."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sidestream.tracking import sweep, wandb_sweep
from sidestream.tracking.sweep import Job, after_sweep
from tests.compare.folders import write_run
from tests.tracking.wandb_file import wandb_runs

LOGGER = {"logger.project": "side", "logger.group": None, "logger.tags": ["mine"], "logger.offline": True}


def made(folder: Path, *arms: dict[str, Any], key: str = "overlap") -> list[Job]:
    jobs = []
    for number, (arm, seed) in enumerate((arm, seed) for arm in arms for seed in (1, 2)):
        place = folder / f"{number}-job"
        write_run(place, seed=seed, load=True, **arm)
        value = "-".join(str(v) for v in arm.get("choices", arm.get("config", {"": "none"})).values())
        (folder / "multirun.yaml").touch()
        overrides = [f"{key}={value}", f"seed={seed}"]
        (place / ".hydra" / "launch.json").write_text(json.dumps({"overrides": overrides}))
        jobs.append(Job(number, place, [f"{key}={value}", f"seed={seed}"], code=0))
    return jobs


def test_the_report_is_made_of_what_the_sweep_varies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = made(tmp_path, {}, {"config": {"optimizer.lr": 0.001}}, key="optimizer.lr")
    after_sweep(tmp_path, jobs)
    assert (tmp_path / "sweep.csv").exists() and (tmp_path / "compare.html").exists()
    told = capsys.readouterr()
    assert "report: " in told.out and told.err == ""
    assert "optimizer.lr" in (tmp_path / "compare.md").read_text()


def test_keys_that_an_arm_sets_are_named_in_the_title(tmp_path: Path) -> None:
    jobs = made(tmp_path, {}, {"config": {"model.hidden_size": 32}}, key="arm")
    after_sweep(tmp_path, jobs)
    assert "model.hidden_size" in (tmp_path / "compare.md").read_text().splitlines()[0]


def test_an_unfair_sweep_has_no_report_and_does_not_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = made(tmp_path, {}, {"result": {"transport": "nccl"}})
    after_sweep(tmp_path, jobs)
    assert "no report: transport=nccl" in capsys.readouterr().err
    assert not (tmp_path / "compare.html").exists()


def test_one_finished_run_is_nothing_to_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = made(tmp_path, {})
    jobs[1].code = 1
    after_sweep(tmp_path, jobs)
    assert not (tmp_path / "compare.html").exists() and "no report" not in capsys.readouterr().err


def test_a_logged_sweep_has_one_table_more_and_a_second_start_goes_on_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "_report", lambda *_: None)
    jobs = made(
        tmp_path, {"config": LOGGER}, {"config": {**LOGGER, "optimizer.lr": 0.001}}, key="optimizer.lr"
    )
    for job in jobs:
        (job.folder / "wandb_id").write_text("x\n")
    after_sweep(tmp_path, jobs)
    jobs[1].code = 1  # the second start fails
    after_sweep(tmp_path, jobs)
    first, second = wandb_runs(tmp_path)
    assert second.exit_code == 1
    assert first.id == second.id == (tmp_path / "wandb_id").read_text().strip()
    assert first.group == f"train-{tmp_path.name}" and first.tags == ["mine"]
    (row,) = [row for row in first.history if any(name.startswith("sweep/jobs") for name in row)]
    assert row["sweep/jobs/nrows"] == 4 and first.exit_code == 0
    # What an upload would send; nothing leaves this machine.
    (folder, *_) = sorted(tmp_path.glob("wandb/offline-run-*"))
    command = [str(Path(sys.executable).parent / "wandb"), "sync", "--dry-run", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and folder.name in done.stdout + done.stderr, done.stdout + done.stderr


def test_only_pictures_of_a_job_itself_are_sent(tmp_path: Path) -> None:
    job, elsewhere = tmp_path / "job", tmp_path / "private.png"
    job.mkdir()
    Image.new("RGB", (3, 2)).save(elsewhere)
    for name in ("link.png", "pipe.png", "text.png", "own.png"):
        assert wandb_sweep._picture(job, name) is None
    (job / "link.png").symlink_to(elsewhere)
    os.mkfifo(job / "pipe.png")
    (job / "text.png").write_text("<svg/>")
    (job / "own.png").write_bytes(elsewhere.read_bytes())
    found = [wandb_sweep._picture(job, name) for name in ("link.png", "pipe.png", "text.png", "own.png")]
    assert found[:3] == [None] * 3 and found[3] is not None and found[3].size == (3, 2)


def test_a_line_of_a_job_shows_what_a_folder_says_as_text(tmp_path: Path) -> None:
    for job in (
        Job(0, tmp_path, [], label="name=\x1b[2J\nerror: x"),
        Job(0, tmp_path, [], label="a", refused="\x1b[2J\n"),
    ):
        assert "\x1b" not in job.line() and "\n" not in job.line() and "\\x1b[2J" in job.line()
