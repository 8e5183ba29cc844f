"""Sweeps: what is skipped, what the table says, what a second start runs. Who gets which cores: test_pool.py.

Most tests run Hydra and its launcher in this process and give the jobs a small script instead of train.py.
"""

import csv
import io
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from sidestream import cli
from sidestream.config.errors import ConfigError
from sidestream.config.layout import Layout
from sidestream.launch import arguments, entry, pool, resume, sweeps
from sidestream.launch.record import Launch
from sidestream.tracking import sweep as tracking
from sidestream.tracking.sweep import Job
from tests.fake_checkpoint import EMPTY, make_checkpoint

REPOSITORY = Path(__file__).parents[2]
LAYOUT = Layout(2, 2, 2, 1, 4, 1, "cpu")
SECONDS = 150  # of a command line; about 12 on two quiet cores

pytestmark = pytest.mark.timeout(120)

# Leaves what train.py would leave. Which seeds fail is in a file beside it.
JOB = """
import json, os, sys
from pathlib import Path
typed = [part for part in sys.argv[1:] if "=" in part]
own = [part for part in typed if not part.startswith(("hydra", "resume"))]
given = dict(part.split("=", 1) for part in typed)
folder = Path((given.get("resume") or given["hydra.run.dir"]).strip("'"))
assert folder.is_dir()
with (folder / "starts").open("a") as file:
    file.write("again" if "resume" in given else "new")
(folder / ".hydra").mkdir(exist_ok=True)
launch = {"command": "", "overrides": own, "flags": [], "choices": {}, "layout": LAYOUT}
(folder / ".hydra" / "launch.json").write_text(json.dumps(launch))
if given["seed"] in (Path(__file__).parent / "fails").read_text().split():
    checkpoint = folder / "checkpoints" / "step-3"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / ".metadata").write_bytes(bytes.fromhex("METADATA"))
    (checkpoint / "meta.pt").write_bytes(b"meta")
    print("error: seed", given["seed"], "fails")
    sys.exit(1)
metrics = {"val_loss": 1.0 + int(given["seed"]), "tokens": 5}
result = {"status": "finished", "metrics": metrics, "seed": int(given["seed"]), "world_size": 2, "error": None}
(folder / "result.json").write_text(json.dumps(result))
"""


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Returns a function that runs a sweep of the script with train.py's configs and tells how it ended."""
    (tmp_path / "fails").write_text("")
    (tmp_path / "job.py").write_text(
        JOB.replace("LAYOUT", repr(vars(LAYOUT))).replace("METADATA", EMPTY.hex())
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "again", lambda: [sys.executable, str(tmp_path / "job.py")])
    monkeypatch.setattr(cli, "module", lambda: "job")
    monkeypatch.setattr(sweeps, "again", None)
    monkeypatch.setattr(sweeps, "_held", {})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    entry.register()

    def run(*argv: str, fails: str = "", folder: str = "s") -> SimpleNamespace:
        (tmp_path / "fails").write_text(fails)
        sweeps.again = None
        for descriptor in sweeps._held.values():  # as the end of a process does
            os.close(descriptor)
        sweeps._held.clear()
        error, code = None, 0
        try:
            if not any(part.startswith("resume_sweep=") for part in argv):
                argv = ("-m", *argv, f"hydra.sweep.dir={folder}")
            else:  # what reads these configs here is no train.py beside them
                argv = ("--config-name", "train", "--config-path", str(REPOSITORY / "conf"), *argv)
            words = sweeps.rewrite(list(argv))
            monkeypatch.setattr(sys, "argv", ["train.py", *words])
            overrides = arguments.split(words)[1]
            with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
                hydra = GlobalHydra.instance().hydra
                hydra.multirun("train", lambda cfg: None, [*overrides, "hydra.mode=MULTIRUN"])
        except ConfigError as raised:
            error, code = raised, 2
        except SystemExit as raised:
            code = raised.code
        printed = capsys.readouterr()
        return SimpleNamespace(
            code=code, error=error, rows=tracking.read_table(Path(folder)), **vars_of(printed)
        )

    return run


def vars_of(printed) -> dict[str, str]:
    return {"out": printed.out, "err": printed.err}


def column(done: SimpleNamespace, name: str) -> list[str]:
    return [row[name] for row in done.rows]


def starts(folder: Path) -> dict[str, str]:
    return {path.parent.name: path.read_text() for path in folder.glob("*/starts")}


def test_an_illegal_combination_is_skipped_with_its_reason(sweep, tmp_path: Path):
    done = sweep("router.top_k=2,9", "seed=1")
    assert done.code == 0
    assert column(done, "state") == ["done", "skipped"]
    reason = done.rows[1]["reason"]
    assert reason.startswith("router.top_k=9: more than model.num_experts=8")
    assert f"#1   skipped     router.top_k=9: {reason}" in done.out
    assert "finished jobs: 1 of 2, skipped: 1" in done.out
    assert [path.name for path in (tmp_path / "s").iterdir() if path.is_dir()] == ["0-top_k-2"]


def test_a_sweep_in_which_no_job_can_run_is_an_error(sweep, tmp_path: Path):
    done = sweep("router.top_k=9,10", "seed=1")
    assert done.code == 2
    assert done.error.key == "router.top_k" and done.error.value == 9
    assert column(done, "state") == ["skipped", "skipped"]
    assert not list((tmp_path / "s").glob("*/"))


def test_one_that_fails_makes_the_exit_code_1(sweep):
    done = sweep("router.top_k=2,9", "seed=1,2", fails="1")
    assert done.code == 1
    assert column(done, "state") == ["FAILED", "done", "skipped", "skipped"]
    assert done.rows[0]["reason"] == "seed 1 fails"
    assert "error: job #0 (s/0-top_k-2_seed-1): seed 1 fails" in done.err


def test_what_the_check_cannot_judge_is_started(sweep, monkeypatch: pytest.MonkeyPatch):
    def bug(cfg):
        raise RuntimeError("a bug of the check")

    monkeypatch.setattr("sidestream.config.compatibility.check", bug)
    assert column(sweep("seed=1,2"), "state") == ["done", "done"]


def test_the_table_has_the_keys_that_differ_and_the_figures(sweep):
    done = sweep("seed=1,2", "model=tiny", "data.seq_length=64,128")
    assert list(done.rows[0]) == [
        "number",
        "state",
        "reason",
        "seconds",
        "folder",
        "seed",
        "data.seq_length",
        "val_loss",
        "train_loss",
        "tokens",
        "tokens_per_second",
        "step_ms",
        "peak_memory_bytes",
        "transport",
        "link",
        "world_size",
    ]
    assert column(done, "seed") == ["1", "1", "2", "2"]
    assert column(done, "val_loss") == ["2.0", "2.0", "3.0", "3.0"]
    assert column(done, "folder")[3] == "3-seed-2_seq_length-128"
    assert all(float(value) > 0 for value in column(done, "seconds"))


def test_the_table_is_written_after_every_job_and_the_hook_is_called_once(
    sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    written, called = [], []
    write = tracking.write_table
    monkeypatch.setattr(
        tracking, "write_table", lambda f, jobs: (written.append([j.state for j in jobs]), write(f, jobs))
    )
    monkeypatch.setattr(tracking, "after_sweep", lambda f, jobs: called.append((f, [j.state for j in jobs])))
    sweep("seed=1,2", "router.top_k=1,9")
    assert written == [
        ["not started", "skipped", "not started", "skipped"],
        ["done", "skipped", "not started", "skipped"],
        ["done", "skipped", "done", "skipped"],
    ]
    assert called == [(tmp_path / "s", ["done", "skipped", "done", "skipped"])]


def test_a_second_start_runs_what_is_missing_or_failed_and_a_third_nothing(sweep, tmp_path: Path):
    folder = tmp_path / "s"
    first = sweep("seed=1,2,3", fails="2")
    assert column(first, "state") == ["done", "FAILED", "done"]
    shutil.rmtree(folder / "2-seed-3")
    second = sweep("resume_sweep=s")
    assert second.code == 0
    assert column(second, "state") == ["done"] * 3
    assert second.rows[0] == first.rows[0]  # with its figures and seconds
    assert starts(folder) == {
        "0-seed-1": "new",
        "1-seed-2": "new",  # resolved.yaml is not there: nothing says that it may go on
        "1-seed-2.failed-0": "new",
        "2-seed-3": "new",
    }
    third = sweep("resume_sweep=s")
    assert third.rows == second.rows
    assert " starts " not in third.out
    assert len(starts(folder)) == 4


def test_a_failed_job_goes_on_from_its_checkpoint_where_the_config_allows_it(
    sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(resume, "check_changes", lambda folder, new, layout, done: [])
    sweep("seed=1,2", fails="1 2")
    done = sweep("resume_sweep=s", fails="2")
    assert done.code == 1
    assert column(done, "state") == ["done", "FAILED"]
    assert "#0   goes on " in done.out
    assert starts(tmp_path / "s") == {"0-seed-1": "newagain", "1-seed-2": "newagain"}


@pytest.mark.full
def test_other_overrides_keep_a_jobs_folder_and_run_it_again(
    sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sweep("seed=1,2", "trainer.max_steps=5", "hydra.launcher.max_concurrent=1")
    done = sweep("resume_sweep=s", "trainer.max_steps=9")
    assert column(done, "folder") == ["0-seed-1", "1-seed-2"]
    assert len(starts(tmp_path / "s")) == 4  # two of them aside
    saved = OmegaConf.load(tmp_path / "s" / "multirun.yaml").hydra.overrides
    assert list(saved.task) == ["seed=1,2", "trainer.max_steps=9"]
    assert not [part for part in saved.hydra if "max_concurrent" in part]  # only what is typed counts
    assert sum(part.startswith("hydra.sweep.dir") for part in saved.hydra) == 1
    third = sweep("resume_sweep=s")
    assert third.rows == done.rows
    assert len(starts(tmp_path / "s")) == 4


@pytest.mark.full
def test_another_choice_of_jobs_leaves_the_folders_of_the_others(sweep, tmp_path: Path):
    sweep("seed=1,2")
    done = sweep("resume_sweep=s", "seed=2,3,4")
    assert column(done, "folder") == ["1-seed-2", "1-seed-3", "2-seed-4"]
    assert starts(tmp_path / "s") == dict.fromkeys(["0-seed-1", "1-seed-2", "1-seed-3", "2-seed-4"], "new")


def test_a_new_job_never_takes_the_folder_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Folders are named by the first 120 letters of the overrides."""
    for number in (1, 2):
        Launch("", [f"seed={number}"], [], {}, LAYOUT).save(prepared(tmp_path / f"{number}-same"))
    monkeypatch.setattr(sweeps, "again", sweeps.Again(tmp_path, frozenset({"seed"})))
    jobs = [Job(n, tmp_path / f"{n}-same", [f"seed={seed}"]) for n, seed in ((1, 3), (2, 1), (3, 4))]
    sweeps.find_earlier(jobs)
    assert [job.folder.name for job in jobs] == ["1-same-2", "1-same", "3-same"]
    shutil.rmtree(tmp_path / "2-same")
    jobs = [Job(n, tmp_path / str(n), [f"seed={seed}"]) for n, seed in ((0, 3), (1, 4))]
    sweeps.find_earlier(jobs)
    assert [job.folder.name for job in jobs] == ["0", "1"]  # either could be the one that is there


def prepared(folder: Path) -> Path:
    (folder / ".hydra").mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("prepare", "more", "why"),
    [
        (lambda folder: None, [], "there is no such folder"),
        (lambda folder: folder.mkdir(), [], "no sweep was started in this folder"),
        (lambda folder: saved(folder, "a: ]"), [], "its multirun.yaml cannot be read"),
        (lambda folder: saved(folder, "seed: 1"), [], "its multirun.yaml cannot be read"),
        (lambda folder: saved(folder), ["resume=x"], "resume= goes on with one run"),
    ],
)
def test_a_wrong_folder_is_one_line(tmp_path: Path, prepare: Callable, more: list[str], why: str):
    prepare(tmp_path / "s")
    with pytest.raises(ConfigError, match=why) as refused:
        sweeps.rewrite([f"resume_sweep={tmp_path / 's'}", *more])
    assert refused.value.key == "resume_sweep"
    assert "\n" not in str(refused.value)


def saved(folder: Path, text: str | None = None, **changes: object) -> Path:
    """Writes the part of multirun.yaml that is read."""
    sources = [{"provider": "main", "path": str(REPOSITORY / "conf")}]
    node = {
        "overrides": {
            "task": ["seed=1,2", "model=tiny"],
            "hydra": ["hydra.mode=MULTIRUN", "hydra.sweep.dir=x"],
        },
        "job": {"config_name": "measure_overlap"},
        "runtime": {"config_sources": sources},
        **changes,
    }
    folder.mkdir()
    (folder / "multirun.yaml").write_text(text or OmegaConf.to_yaml({"hydra": node}))
    return folder


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "again", None)
    monkeypatch.setattr(sys, "argv", [str(REPOSITORY / "scripts" / "measure_overlap.py")])


def test_the_command_line_of_a_sweep_that_runs_again(tmp_path: Path, script: None):
    folder = saved(tmp_path / "it's")
    place = f"hydra.sweep.dir={arguments.quoted(folder)}"
    assert sweeps.rewrite([f"resume_sweep={folder}"]) == ["-m", "seed=1,2", "model=tiny", place]
    assert sweeps.rewrite(["-m", f"resume_sweep={folder}", "seed=3", "hydra.sweep.dir=y"]) == [
        "-m",
        "model=tiny",
        "seed=3",
        place,
    ]
    assert sweeps.again == sweeps.Again(folder, frozenset({"seed"}))


def test_a_sweep_that_runs_again_finds_the_users_own_options(tmp_path: Path, script: None):
    (tmp_path / "conf").mkdir()
    sources = [
        {"provider": "main", "path": str(tmp_path / "conf")},
        {"provider": "command-line", "path": "/my conf"},
    ]
    folder = saved(tmp_path / "s", runtime={"config_sources": sources}, job={"config_name": "mine"})
    flags = f"--config-name mine --config-dir '/my conf' --config-path {tmp_path / 'conf'}"
    with pytest.raises(ConfigError, match=f"run with {flags} if you trust it"):
        sweeps.rewrite([f"resume_sweep={folder}"])
    assert sweeps.rewrite([f"resume_sweep={folder}", "-cd", "/other"])[:3] == ["-cd", "/other", "-m"]


def test_an_override_with_an_interpolation_comes_back_as_it_was_typed(tmp_path: Path, script: None):
    folder = saved(tmp_path / "s", overrides={"task": ["name=run-${seed}"], "hydra": []})
    assert "name=run-${seed}" in sweeps.rewrite([f"resume_sweep={folder}"])


@pytest.mark.parametrize("argv", [["seed=1"], ["-m", "seed=1,2"], ["--help"]])
def test_without_resume_sweep_the_command_line_stays(argv: list[str]):
    assert sweeps.rewrite(argv) == argv
    assert sweeps.rewrite([*argv, "resume_sweep=null"]) == argv


def test_a_sweep_that_still_runs_is_left_alone(tmp_path: Path, script: None):
    pytest.importorskip("fcntl")
    folder = saved(tmp_path / "s")
    code = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'r+'); fcntl.flock(file, fcntl.LOCK_EX);"
        "print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(folder / "multirun.yaml")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="another process runs this sweep"):
            sweeps.rewrite([f"resume_sweep={folder}"])
    finally:
        process.kill()
        process.communicate()
    assert sweeps.rewrite([f"resume_sweep={folder}"])
    os.close(sweeps._held.pop(folder))


def test_a_job_whose_model_changed_starts_from_scratch(tmp_path: Path):
    run = tmp_path / "0"
    (run / ".hydra").mkdir(parents=True)
    config = {
        "trainer": {"max_steps": 5},
        "scheduler": {"_target_": "x.Constant"},
        "model": {"num_layers": 2},
    }
    OmegaConf.save(OmegaConf.create(config), run / ".hydra" / "resolved.yaml")
    Launch("", [], [], {}, LAYOUT).save(run)
    assert not sweeps.goes_on(run, new=config, layout=LAYOUT)  # no checkpoint
    make_checkpoint(run / "checkpoints" / "step-00000003")
    assert sweeps.goes_on(run, new=config, layout=LAYOUT)
    assert not sweeps.goes_on(run, new={**config, "model": {"num_layers": 4}}, layout=LAYOUT)
    (run / ".hydra" / "launch.json").write_text("{")  # cut by a crash
    assert not sweeps.goes_on(run, new=config, layout=LAYOUT)


def test_what_is_set_aside_is_never_overwritten(tmp_path: Path):
    for content in ("first", "second"):
        (tmp_path / "[0]").mkdir()
        (tmp_path / "[0]" / "x").write_text(content)
        sweeps.set_aside(tmp_path / "[0]")
    assert [(tmp_path / f"[0].failed-{n}" / "x").read_text() for n in (0, 1)] == ["first", "second"]
    (tmp_path / "[0]").mkdir()
    sweeps.set_aside(tmp_path / "[0]")
    assert (tmp_path / "[0]").is_dir()


def test_null_is_typed_in_several_ways():
    assert sweeps.values(["experiment=null", "logger=null", "+a.b='x y'"]) == {"logger": "none", "a.b": "x y"}


@pytest.mark.parametrize(
    ("code", "state", "reason"),
    [
        (None, "not started", ""),
        (0, "done", ""),
        (143, "interrupted", "stopped by SIGTERM"),
        (-2, "interrupted", "stopped by SIGINT"),
        (-9, "FAILED", "exit code -9; see "),
        (1, "FAILED", "exit code 1; see "),
    ],
)
def test_states(tmp_path: Path, code: int | None, state: str, reason: str):
    job = Job(0, tmp_path, [], code=code)
    assert job.state == state
    assert job.reason.startswith(reason) and bool(job.reason) == bool(reason)


def test_the_reason_of_an_earlier_start_is_not_taken_for_this_one(tmp_path: Path):
    (tmp_path / "stdout.log").write_text("error: earlier\n")
    job = Job(0, tmp_path, [], code=1, log_start=15)
    assert job.reason.startswith("exit code 1; see ")
    with (tmp_path / "stdout.log").open("a") as log:
        log.write("error: now\n")
    assert job.reason == "now"


def test_a_table_of_awkward_values_is_read_back(tmp_path: Path):
    jobs = [Job(n, tmp_path / str(n), [f"name='a,\"{n}'", *(["+x=1"] if n else [])]) for n in (0, 1)]
    jobs[1].refused = 'x=1: "quoted", and, commas'
    tracking.write_table(tmp_path, jobs)
    table = tracking.read_table(tmp_path)
    assert [row["name"] for row in table] == ['a,"0', 'a,"1']
    assert [row["x"] for row in table] == ["", "1"]
    assert table[1]["reason"] == 'x=1: "quoted", and, commas'
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.csv"]


def test_more_jobs_at_once_than_cores_is_refused_before_a_job_starts(sweep, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool, "available_cores", lambda: [0, 1])
    done = sweep("seed=1,2", "hydra.launcher.max_concurrent=3")
    assert done.code == 2
    assert str(done.error).startswith("hydra.launcher.max_concurrent=3: this process may use 2 cores")
    assert done.rows == []


def command_line(environment: dict[str, str], work: Path, *words: str) -> subprocess.Popen:
    command = [sys.executable, str(REPOSITORY / "train.py"), *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=work, env=environment, start_new_session=True, **pipes)


@pytest.mark.full
@pytest.mark.shell
@pytest.mark.timeout(2 * SECONDS + 10)
def test_from_the_shell_an_interrupted_sweep_goes_on(environment: dict[str, str], work: Path):
    """Two jobs wait until they are stopped; the second start continues them from their checkpoints."""
    at_once = min(2, len(pool.available_cores()))
    words = ["-m", "name=waits", "seed=1,2", "router.top_k=2,9", "hydra.sweep.dir=s"]
    process = command_line(environment, work, *words, f"hydra.launcher.max_concurrent={at_once}")
    try:
        limit = time.monotonic() + SECONDS
        while len(list(work.glob("s/*/ready1"))) < at_once:
            assert time.monotonic() < limit and process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    states = ["interrupted", "skipped", "interrupted" if at_once == 2 else "not started", "skipped"]
    assert [row["state"] for row in tracking.read_table(work / "s")] == states

    process = command_line(environment, work, "resume_sweep=s", "name=ok")
    try:
        out, err = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert "#0   goes on " in out
    table = list(csv.DictReader(io.StringIO((work / "s" / "sweep.csv").read_text())))
    assert [row["state"] for row in table] == ["done", "skipped", "done", "skipped"]
    assert [row["val_loss"] for row in table] == ["2.0", "", "3.0", ""]
    assert len(list((work / "s").glob("*/"))) == 2


@pytest.mark.shell
@pytest.mark.timeout(2 * SECONDS + 10)
def test_from_the_shell_nonsense_is_one_line(environment: dict[str, str], work: Path):
    for words in (["-m", "router.top_k=9,10"], ["resume_sweep=nowhere"]):
        process = command_line(environment, work, *words)
        try:
            _, err = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
        assert process.returncode == 2
        assert err.startswith(f"error: {words[-1].partition(',')[0]}: ")
        assert err.count("\n") == 1
