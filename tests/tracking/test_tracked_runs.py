"""Whole runs: what is in the folder afterwards, and what the loggers got of it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sidestream.tracking import names
from sidestream.tracking.folder import RunFolder
from sidestream.tracking.load import load_metrics
from tests.tracking.wandb_file import wandb_runs
from tests.train.fit import MICRO, fit

REPOSITORY = Path(__file__).parents[2]
WANDB = ["logger=wandb", "logger.offline=true"]
FAILS = ["optimizer.lr=1e12", "trainer.gradient_clip_val=null"]  # the loss becomes NaN after a step or two


def records(folder):
    """(training records, validation records)"""
    every = RunFolder(folder).read_metrics()
    return [r for r in every if names.TRAIN_LOSS in r], [r for r in every if names.VAL_LOSS in r]


@pytest.mark.parametrize(
    ("options", "world"),
    [
        ([], 2),
        (["model=tiny_dense"], 2),
        (["balance=bias"], 2),
        (["balance=none", "dispatcher=local"], 1),
        (["trainer.precision=bf16-mixed", "data.micro_batch_size=2", "trainer.peak_tflops=null"], 2),
    ],
)
@pytest.mark.sample(2)
def test_every_record_has_the_same_names_in_every_configuration(options, world, tmp_path):
    fit(tmp_path, *options, "trainer.max_steps=2", world=world, picture=True)
    training, validation = records(tmp_path)
    assert [set(r) for r in training] == [{names.STEP, names.TOKENS, *names.TRAINING}] * 2
    assert [set(r) for r in validation] == [{names.STEP, names.TOKENS, *names.VALIDATION}]
    known = {name for name, value in training[-1].items() if value is not None}
    always = {n for n in names.TRAINING if not n.startswith("moe/")} - {names.MFU}
    assert always <= known
    assert (names.MFU in known) == ("trainer.peak_tflops=null" not in options)
    assert (names.AUX_LOSS in known) == (not any(o.startswith(("balance=", "model=")) for o in options))
    assert (names.LOAD in known) == ("model=tiny_dense" not in options)


def test_metrics_agree_with_each_other(tmp_path):
    (result, _) = fit(tmp_path, "trainer.peak_tflops=0.5", "logger=csv", picture=True)
    training, _ = records(tmp_path)
    loads = RunFolder(tmp_path).read_expert_load()
    assert [load["steps"] for load in loads] == [1] * 6
    for record, load in zip(training, loads):
        counts = np.array(load["counts"])
        assert counts.sum(axis=1).tolist() == [8 * 16 * 2] * 2  # tokens x top_k, in each of 2 layers
        assert {n: record[n] for n in load_metrics(counts, num_ranks=2)} == load_metrics(counts, num_ranks=2)
        # Counts of rows and of 2 experts go from each of 2 ranks to the other, in 2 layers; with a row travel 2 bytes
        # of expert id and 4 of weight, and the 4 of its gradient come back.
        rows = (record[names.METADATA_BYTES] - 2 * 2 * 3 * 8) / (2 + 4 + 4)
        # A row of 64 fp32 numbers travels 4 times: there and back, forward and backward.
        assert record[names.BYTES_ON_WIRE] - record[names.METADATA_BYTES] == rows * 4 * 64 * 4
        assert record[names.PEAK_MEMORY] >= record[names.MEMORY] > 2**20
    assert training[0][names.SLOWEST_STEP_MS] is None  # known one step later
    assert training[-1][names.SLOWEST_STEP_MS] > 0
    metrics = result["metrics"]
    assert (metrics["peak_tflops"], metrics["peak_source"]) == (0.5, "trainer.peak_tflops")
    assert metrics["mfu"] == pytest.approx(
        result["flops_per_token"] * metrics["tokens_per_second"] / (2 * 0.5e12)
    )
    assert metrics["bytes_on_wire"] == sum(record[names.BYTES_ON_WIRE] for record in training)
    assert (tmp_path / "expert_load.png").read_bytes().startswith(b"\x89PNG")
    head = (tmp_path / "csv" / "version_0" / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {f"{names.LAYER_LOAD}/0", f"{names.LAYER_LOAD}/1", names.MFU, names.VAL_LOSS} <= set(head)
    assert names.Z_LOSS not in head


@pytest.mark.full
def test_jobs_in_one_process_give_one_wandb_run_each_and_a_failed_one_is_marked(tmp_path):
    for job in (0, 1):
        fit(tmp_path / str(job), *WANDB, f"seed={job}", picture=True)
    with pytest.raises(AssertionError, match=r"is (nan|inf); lower optimizer\.lr"):
        fit(tmp_path / "2", *WANDB, *FAILS, "seed=2", picture=True)
    runs = [wandb_runs(tmp_path / str(job)) for job in range(3)]
    assert [len(run) for run in runs] == [1, 1, 1]
    assert len({run.id for (run,) in runs}) == 3
    assert [run.exit_code for (run,) in runs] == [0, 0, 1]
    for job, (run,) in enumerate(runs):
        assert run.id == (tmp_path / str(job) / "wandb_id").read_text().strip()
        assert run.config["seed"] == job
        assert (run.config["world_size"], run.config["expert_parallel_size"]) == (2, 2)
        assert "model:tiny" in run.tags
        assert "${" not in json.dumps(run.config)
    (run,) = runs[0]
    # A validation at step 6 and then the picture.
    assert run.steps == [1, 2, 3, 4, 5, 6, 6, 6]
    training, validation = records(tmp_path / "0")
    assert [row[names.TRAIN_LOSS] for row in run.history[:6]] == [r[names.TRAIN_LOSS] for r in training]
    assert [row[names.TOKENS] for row in run.history[:6]] == [128 * step for step in range(1, 7)]
    assert run.history[0][f"{names.LAYER_LOAD}/1"] == training[0][names.LAYER_LOAD][1]
    assert run.history[6][names.VAL_LOSS] == validation[0][names.VAL_LOSS]
    assert run.history[7][f"{names.LOAD_PICTURE}/_type"].startswith("image")
    assert list((tmp_path / "0").rglob("wandb/*/files/media/images/moe/*.png"))


@pytest.mark.parametrize("crashed", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_resume_continues_the_wandb_run_and_no_step_is_there_twice(tmp_path, crashed):
    if crashed:  # 6 steps were logged, the newest checkpoint is of step 3
        fit(tmp_path, *WANDB, "callbacks.checkpoint.every_n_steps=3", picture=True)
        (tmp_path / "checkpoints" / "step-00000006").rename(tmp_path / "gone")
    else:
        fit(tmp_path, *WANDB, stop=(1, 4), picture=True)
    first_steps = wandb_runs(tmp_path)[0].steps
    fit(tmp_path, *WANDB, f"resume={tmp_path}", "trainer.max_steps=8", picture=True)
    first, second = wandb_runs(tmp_path)
    assert first.id == second.id == (tmp_path / "wandb_id").read_text().strip()
    assert first.steps == first_steps
    assert [r[names.STEP] for r in records(tmp_path)[0]] == list(range(1, 9))
    steps = [*dict.fromkeys(first.steps), *dict.fromkeys(second.steps)]
    assert steps == list(range(1, 9))


@pytest.mark.full
@pytest.mark.shell
@pytest.mark.timeout(300)
def test_a_sweep_over_two_ranks_has_one_wandb_run_per_job(tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_") and "RANK" not in k}
    environment |= {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "CUDA_VISIBLE_DEVICES": ""}
    arguments = [*MICRO, "logger=wandb", "trainer.devices=2", "optimizer.lr=1e-3,1e12"]
    arguments += ["trainer.gradient_clip_val=null", "hydra.sweep.dir=sweep"]
    command = [sys.executable, str(REPOSITORY / "train.py"), "-m", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "finished jobs: 1 of 2" in done.stdout
    jobs = sorted((tmp_path / "sweep").glob("[0-9]*"))  # beside them the table of the sweep
    runs = [wandb_runs(job) for job in jobs]
    assert [len(run) for run in runs] == [1, 1]
    assert [run.exit_code for (run,) in runs] == [0, 1]
    assert len({run.id for (run,) in runs}) == 2
    assert [run.group for (run,) in runs] == ["train-sweep", "train-sweep"]
    # What was swept, and nothing else of what was typed.
    assert [run.name.rpartition("=")[0] for (run,) in runs] == ["train-optimizer.lr"] * 2
    assert len({run.name for (run,) in runs}) == 2
    assert len(list(tmp_path.rglob("run-*.wandb"))) == 3  # one per job, and the table of the sweep


def test_tensorboard_gets_scalars_config_and_picture(tmp_path):
    pytest.importorskip("tensorboard", reason="needs pip install 'sidestream[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read():
        events = EventAccumulator(str(tmp_path / "tensorboard"))
        events.Reload()
        return events

    fit(tmp_path, "logger=tensorboard", "callbacks.checkpoint.every_n_steps=4", stop=(0, 6), picture=True)
    events = read()
    training, _ = records(tmp_path)
    assert [(e.step, pytest.approx(e.value)) for e in events.Scalars(names.TRAIN_LOSS)] == [
        (r[names.STEP], r[names.TRAIN_LOSS]) for r in training
    ]
    assert {f"{names.LAYER_LOAD}/0", names.TOKENS_PER_SECOND} <= set(events.Tags()["scalars"])
    assert "max_steps: 6" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    # As after a crash: steps 5 and 6 were logged, the newest checkpoint is of step 4.
    for path in (tmp_path / "checkpoints").glob("*6"):
        path.rename(tmp_path / "gone")
    fit(tmp_path, "logger=tensorboard", f"resume={tmp_path}", picture=True)
    events = read()
    assert [event.step for event in events.Scalars(names.TRAIN_LOSS)] == [1, 2, 3, 4, 5, 6]
    assert [image.step for image in events.Images(names.LOAD_PICTURE)] == [
        6
    ]  # who stops a run is not kept waiting


def test_the_page_explains_every_metric():
    page = (REPOSITORY / "docs" / "tracking.md").read_text()
    explained = re.findall(r"^\| `([\w/]+)` \|.*\| .+ \|$", page, re.MULTILINE)
    assert len(explained) == len(set(explained))
    wanted = {
        names.STEP,
        names.TOKENS,
        *names.TRAINING,
        *names.VALIDATION,
        *names.OVERLAP,
        names.LOAD_PICTURE,
        names.OVERLAP_PICTURE,
    }
    assert {name for name in explained if name != "wandb_id"} == wanted
    constants = {v for k, v in vars(names).items() if k.isupper() and isinstance(v, str)}
    assert constants == wanted
