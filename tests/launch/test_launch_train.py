"""Runs train.py: what the user sees, the exit code and what is left in the folder. Every run has a time limit."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

TRAIN = Path(__file__).parents[2] / "train.py"
Train = Callable[..., subprocess.CompletedProcess]

pytestmark = [pytest.mark.shell, pytest.mark.timeout(200)]


def only(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    assert len(found) == 1, found
    return found[0]


def test_the_rank_that_raised_is_shown_and_not_the_one_that_lost_its_connection(train: Train, work: Path):
    done = train("name=raises")
    assert done.returncode == 1
    assert "rank 1 of 2 failed" in done.stderr
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.splitlines()[-1] == "error: rank 1: RuntimeError: the wheel came off"
    folder = only(work, "logs/raises/runs/*/*/")
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["error"]) == ("failed", "rank 1: RuntimeError: the wheel came off")
    assert "the wheel came off" in (folder / "rank1.log").read_text()


def test_a_killed_rank_is_named_before_the_error_it_causes_elsewhere(train: Train):
    done = train("name=killed")
    assert done.returncode == 1
    assert "error: rank 1: killed by SIGKILL" in done.stderr
    assert "Connection closed" not in done.stderr


def test_a_rank_that_hangs_is_killed_and_leaves_its_stack_in_its_log(train: Train, work: Path):
    done = train("name=hangs")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: rank 0: ValueError: rank 0 has a bug"
    assert "in train" in only(work, "logs/hangs/runs/*/*/rank1.log").read_text()


def test_sigterm_reaches_every_rank_and_ends_with_143(environment: dict[str, str], work: Path):
    command = [sys.executable, str(TRAIN), "name=waits", "hydra.run.dir=waiting"]
    process = subprocess.Popen(command, cwd=work, env=environment, start_new_session=True)
    try:
        limit = time.monotonic() + 100
        while not all((work / "waiting" / f"ready{rank}").exists() for rank in (0, 1)):
            assert time.monotonic() < limit
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=100) == 128 + signal.SIGTERM
    finally:
        process.kill()
    assert json.loads((work / "waiting" / "result.json").read_text())["status"] == "interrupted"


@pytest.mark.full
def test_a_used_folder_is_refused_and_resume_goes_on_in_it(train: Train, work: Path):
    name = "it's a=b, c"
    escaped = name.replace("'", "\\'")
    place = f"hydra.run.dir='{escaped}'"
    assert train("name=ok", "optimizer.lr=0.01", place).returncode == 0
    first = (work / name / "seen1.json").read_text()

    again = train("name=ok", "seed=2", place)
    assert again.returncode == 2
    assert again.stderr.startswith("error: hydra.run.dir=")
    assert (work / name / "seen1.json").read_text() == first

    resumed = train(f"resume='{escaped}'", "trainer.max_steps=900")
    assert resumed.returncode == 0, resumed.stderr
    assert "resume: trainer.max_steps 500 -> 900" in resumed.stdout
    assert "no longer bit-identical" in resumed.stdout
    refused = train(f"resume='{escaped}'", "model.num_layers=6")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: model.num_layers=6: was 4")
    launch = json.loads((work / name / ".hydra" / "launch.json").read_text())
    assert launch["overrides"] == ["name=ok", "optimizer.lr=0.01", "trainer.max_steps=900"]
    resolved = (work / name / ".hydra" / "resolved.yaml").read_text()
    assert "max_steps: 900" in resolved
    assert "${" not in resolved


@pytest.mark.full
def test_a_sweep_gives_each_job_its_own_folder_and_goes_on_after_a_failure(train: Train, work: Path):
    done = train("-m", "name=one_seed_fails", "seed=1,2", "router.top_k=1,2")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "finished jobs: 3 of 4" in done.stdout
    failed = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(failed) == 1
    assert "2-seed-2_top_k-1" in failed[0]
    sweep = only(work, "logs/one_seed_fails/multiruns/*/*/")
    assert len(list((work / "logs").rglob(".hydra"))) == 4  # no stray folders
    jobs = sorted(path.name for path in sweep.iterdir() if path.is_dir())
    assert jobs == ["0-seed-1_top_k-1", "1-seed-1_top_k-2", "2-seed-2_top_k-1", "3-seed-2_top_k-2"]
    for job in jobs:
        seen = [json.loads((sweep / job / f"seen{rank}.json").read_text()) for rank in (0, 1)]
        assert [rank["folder"] for rank in seen] == [str(sweep / job)] * 2
        assert [rank["seed"] for rank in seen] == [int(job[7])] * 2
        assert (sweep / job / "stdout.log").exists()
    assert os.listdir(work) == ["logs"]
