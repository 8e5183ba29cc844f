"""Command lines that nearly say what was meant: one line with the right command."""

import errno
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.errors import ConfigCompositionException

from sidestream.config.errors import ConfigError, cannot_write, is_of_place
from sidestream.launch import arguments, entry, torchrun

AMBIGUOUS = "Ambiguous value for argument '{}'\n1. To use it as a list, use key=[value1,value2]"


@pytest.fixture(autouse=True)
def _as_typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A user in the repository who typed `python train.py`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py"])
    for size, number in torchrun._TASKS.values():
        monkeypatch.delenv(size, raising=False)
        monkeypatch.delenv(number, raising=False)
    for name in (
        "ALPS_APP_PE",
        "RANK",
        "WORLD_SIZE",
        "SLURM_STEP_ID",
        "SLURM_NNODES",
        "SLURM_STEP_NUM_NODES",
        "ENVIRONMENT",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("message", "typed", "fix"),
    [
        (
            AMBIGUOUS.format("seed=1,2"),
            ["model=small", "seed=1,2", "name=a b"],
            "run python train.py -m model=small seed=1,2 'name=a b'",
        ),
        (
            "Sweep parameters 'seed=range(1,3)' requires --multirun",
            ["seed=range(1,3)"],
            "run python train.py -m 'seed=range(1,3)'",
        ),
        (
            AMBIGUOUS.format("model=tiny,small"),
            ["model=tiny,small"],
            "run python train.py -m model=tiny,small",
        ),
        (
            AMBIGUOUS.format("optimizer.betas=0.9,0.95"),
            ["optimizer.betas=0.9,0.95"],
            "run with 'optimizer.betas=[0.9,0.95]'",
        ),
        (
            AMBIGUOUS.format("optimizer.lr=0,001"),
            ["optimizer.lr=0,001"],
            "set optimizer.lr=0.001",
        ),
        (
            AMBIGUOUS.format("trusted_targets=a,b"),
            ["trusted_targets=a,b"],
            "run with 'trusted_targets=[a,b]'",
        ),
    ],
)
def test_several_values_without_m_are_answered_with_the_command(message: str, typed: list[str], fix: str):
    explained = arguments.several_values(ConfigCompositionException(message), typed)
    assert str(explained).endswith(f"; {fix}")
    assert "\n" not in str(explained)


def test_other_errors_are_not_about_several_values():
    assert arguments.several_values(ConfigCompositionException("Could not override 'x'"), ["x=1"]) is None


def study(*overrides: str) -> SimpleNamespace:
    return SimpleNamespace(
        sweeper={"params": {"overlap": "none,chunked", "seed": "1,2"}},
        overrides=SimpleNamespace(task=list(overrides)),
        runtime=SimpleNamespace(choices={"experiment": "overlap_matrix"}),
    )


@pytest.mark.parametrize("more", [[], ["seed=3"]])
def test_a_study_without_m_is_refused(more: list[str]):
    words = ["experiment=overlap_matrix", *more]
    with pytest.raises(ConfigError) as refused:
        arguments.refuse_study(study(*words), words)
    assert str(refused.value).endswith(f"; run python train.py -m {' '.join(words)}")
    assert "overlap, seed" in str(refused.value)


def test_one_arm_of_a_study_runs_if_it_is_named():
    arguments.refuse_study(study("experiment=overlap_matrix", "+overlap=none", "seed=1"), [])
    arguments.refuse_study(SimpleNamespace(sweeper={}, overrides=SimpleNamespace(task=[])), [])


@pytest.mark.parametrize(
    "argv",
    [
        ["model=small", "-m", "seed=1,2"],
        ["model=small", "seed=1,2", "-m"],
        ["-m", "model=small", "seed=1,2"],
        ["model=small", "--multirun", "seed=1,2"],
    ],
)
def test_flags_may_stand_anywhere(argv: list[str]):
    flags, overrides = arguments.split(argv)
    assert flags in (["-m"], ["--multirun"]) and overrides == ["model=small", "seed=1,2"]


def test_flags_with_values_may_stand_anywhere():
    flags, overrides = arguments.split(["a=1", "-cd", "my conf", "b=2", "--config-name", "train", "c=3"])
    assert flags == ["-cd", "my conf", "--config-name", "train"] and overrides == ["a=1", "b=2", "c=3"]


@pytest.mark.parametrize(
    ("argv", "runs"),
    [
        (["seed=1"], True),
        (["seed=1,2", "-m"], True),
        (["seed=1", "--cfg", "job"], False),
        (["--help"], False),
        (["--info", "defaults"], False),
        (["-sc", "query=bash"], False),
    ],
)
def test_what_asks_for_a_text_says_nothing_else(argv: list[str], runs: bool):
    assert arguments.runs(argv) is runs


TASKS = [
    (
        {"SLURM_NTASKS": "2", "SLURM_PROCID": "{}", "SLURM_STEP_ID": "0", "SLURM_NNODES": "1"},
        "srun --nodes=1 --ntasks=1 python train.py seed=1 trainer.devices=2",
    ),
    (
        {
            "SLURM_NTASKS": "4",
            "SLURM_PROCID": "{}",
            "SLURM_STEP_ID": "0",
            "SLURM_NNODES": "2",
            "SLURMD_NODENAME": "n1",
        },
        "srun --nodes=2 --ntasks=2 torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d "
        "--rdzv-endpoint=n1:29500 train.py seed=1",
    ),
    (
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "{}", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        "python train.py seed=1 trainer.devices=2",
    ),
    ({"PMI_SIZE": "2", "PMI_RANK": "{}"}, "python train.py seed=1 trainer.devices=2"),
    (
        {"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "{}", "FLUX_JOB_NNODES": "1"},
        "flux run --nodes=1 --ntasks=1 python train.py seed=1 trainer.devices=2",
    ),
    (
        {"FLUX_JOB_SIZE": "4", "FLUX_TASK_RANK": "{}", "FLUX_JOB_NNODES": "2", "SLURMD_NODENAME": "n1"},
        "flux run --nodes=2 --ntasks=2 torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d "
        "--rdzv-endpoint=n1:29500 train.py seed=1",
    ),
    (
        {
            "JSM_NAMESPACE_SIZE": "2",
            "JSM_NAMESPACE_RANK": "{}",
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_RANK": "{}",
        },
        "python train.py seed=1 trainer.devices=2",
    ),
]


@pytest.mark.parametrize(("variables", "command"), TASKS)
def test_tasks_that_do_not_know_of_each_other_start_nothing(
    variables: dict[str, str], command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(0))
    with pytest.raises(ConfigError) as refused:
        torchrun.refuse_tasks(["seed=1"])
    assert str(refused.value).endswith(f"; run {command}")
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(1))
    with pytest.raises(SystemExit) as silent:
        torchrun.refuse_tasks(["seed=1"])
    assert silent.value.code == 2 and capsys.readouterr() == ("", "")


def test_aprun_which_does_not_say_how_many_there_are_is_refused_by_all_but_the_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.setenv("ALPS_APP_PE", "1")
    with pytest.raises(ConfigError) as refused:
        torchrun.refuse_tasks(["seed=1"])
    assert str(refused.value).endswith("; run aprun -n 1 python train.py seed=1")
    monkeypatch.setenv("ALPS_APP_PE", "2")
    with pytest.raises(SystemExit) as silent:
        torchrun.refuse_tasks(["seed=1"])
    assert silent.value.code == 2 and capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"ALPS_APP_PE": "0"},  # aprun -n 1
        {"FLUX_JOB_SIZE": "1", "FLUX_TASK_RANK": "0"},
        {"SLURM_NTASKS": "2"},  # a shell of salloc
        {"SLURM_NTASKS": "2", "SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"},  # a script of sbatch
        {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        {  # srun torchrun
            "SLURM_NTASKS": "2",
            "SLURM_PROCID": "1",
            "SLURM_STEP_ID": "0",
            **dict.fromkeys(torchrun._VARIABLES, "1"),
        },
    ],
)
def test_a_task_of_its_own_runs(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    torchrun.refuse_tasks([])


@pytest.mark.parametrize(
    "number", [errno.EACCES, errno.ENOSPC, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG]
)
def test_a_place_that_cannot_be_written_is_named_with_its_key(number: int):
    error = OSError(number, "no luck", "/a/b/c")
    assert is_of_place(error)
    line = str(entry._of_folder(error, ["seed=1", "paths.log_dir=/a/b"]))
    assert line.startswith("paths.log_dir=/a/b: cannot be written (no luck: /a/b/c); ")
    assert str(entry._of_folder(error, ["hydra.run.dir=/a/b/c"])).startswith(
        "hydra.run.dir=/a/b/c: cannot be"
    )
    assert str(cannot_write("out", "/a/b/c", error)).startswith("out=/a/b/c: cannot be written (no luck); ")


def test_an_error_of_no_place_stays_one():
    assert not is_of_place(OSError(errno.ECONNRESET, "reset", "/a"))
    assert not is_of_place(OSError(errno.ENOENT, "no file is named"))
    assert is_of_place(OSError(errno.ENOSPC, "a write names none"))
    assert not is_of_place(ValueError("x"))


def test_a_file_where_the_log_folder_should_be_is_one_line(tmp_path: Path):
    (tmp_path / "logs").touch()
    with pytest.raises(OSError) as error:
        entry._claim(tmp_path / "logs" / "train" / "runs" / "1")
    assert is_of_place(error.value)
