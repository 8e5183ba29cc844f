import csv
import os
import sys

import pytest
from omegaconf import OmegaConf

from sidestream.config import schema
from sidestream.config.errors import ConfigError
from sidestream.lightning import loggers
from sidestream.lightning.loggers import build_loggers, finish_loggers

WANDB = {
    "_target_": "sidestream.lightning.loggers.wandb_logger",
    "project": "sidestream",
    "group": None,
    "tags": ["mine"],
    "offline": "auto",
}
CSV = {"_target_": "sidestream.lightning.loggers.csv_logger"}
CHOICES = {"dispatcher": "alltoall", "overlap": "none", "hydra/output": "default"}


def build(folder, logger, *, rank=0, seed=1, choices=CHOICES):
    folder.mkdir(parents=True, exist_ok=True)
    cfg = OmegaConf.create({"name": "train", "seed": seed, "twice": "${seed}", "logger": logger})
    OmegaConf.set_struct(cfg, True)
    return build_loggers(
        cfg.logger, folder=folder, cfg=cfg, choices=choices, identity={"world_size": 2, "ep": 1}, rank=rank
    )


@pytest.fixture(autouse=True)
def no_credentials(tmp_path, monkeypatch):
    """Neither the user's keys nor a network: `auto` must find out that it is offline."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "home" / "netrc"))
    monkeypatch.setenv("WANDB_SILENT", "true")


def run_folders(folder):
    return sorted(path.name for path in (folder / "wandb").glob("offline-run-*"))


@pytest.mark.parametrize("logger", [None, {}, OmegaConf.structured(schema.Logger)])
def test_no_logger(tmp_path, logger):
    assert build(tmp_path, logger) == []
    assert build(tmp_path, logger, rank=1) == []


def test_csv_writes_each_log_at_once_and_a_resume_gets_a_file_of_its_own(tmp_path):
    for version in (0, 1):
        (logger,) = build(tmp_path, CSV)
        logger.log_metrics({"train/loss": 2.5}, step=10)
        logger.log_metrics({"train/loss": 2.0, "val/loss": 3.0}, step=20)
        with (tmp_path / "csv" / f"version_{version}" / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [(row["step"], row["train/loss"]) for row in rows] == [("10", "2.5"), ("20", "2.0")]
        finish_loggers([logger], 0)


@pytest.mark.parametrize("logger", [CSV, WANDB])
def test_other_ranks_write_nothing_and_accept_everything(tmp_path, logger):
    (logger,) = build(tmp_path, logger, rank=1)
    logger.log_metrics({"train/loss": 1.0}, step=1)
    logger.log_hyperparams({"a": 1})
    logger.experiment.config.update({"a": 1})
    logger.experiment.config["a"] = 1
    logger.experiment.log({"x": logger.experiment.summary["y"]})
    finish_loggers([logger], 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_jobs_of_one_process_are_runs_of_their_own_and_a_resume_continues_one(tmp_path, monkeypatch):
    import wandb

    starts, ends = [], []
    init, finish = wandb.init, wandb.Run.finish

    def record_init(**arguments):
        starts.append(arguments)
        return init(**arguments)

    def record_finish(run, exit_code=None, **arguments):
        ends.append((run.id, exit_code))
        return finish(run, exit_code=exit_code, **arguments)

    monkeypatch.setattr(wandb, "init", record_init)
    monkeypatch.setattr(wandb.Run, "finish", record_finish)
    sweep = tmp_path / "2026-01-01_00-00-00"
    folders = [sweep / str(job) for job in range(3)]
    sweep.mkdir()
    (sweep / "multirun.yaml").write_text("")
    ids = []
    for job, folder in enumerate([*folders, folders[0]]):
        hydra = folder / ".hydra"
        hydra.mkdir(parents=True, exist_ok=True)
        (hydra / "overrides.yaml").write_text("- logger=wandb\n- seed=7\n")
        (logger,) = build(folder, WANDB, seed=7)
        assert wandb.run.id == logger.version == (folder / "wandb_id").read_text().strip()
        config = dict(logger.experiment.config)
        assert (config["seed"], config["twice"], config["world_size"]) == (7, 7, 2)
        assert config["choices"]["dispatcher"] == "alltoall"
        logger.log_metrics({"train/loss": 2.0, "progress/tokens": 100}, step=job)
        finish_loggers([logger], 1 if job == 1 else 0)
        finish_loggers([logger], 0)
        assert wandb.run is None
        ids.append(logger.version)

    assert len(set(ids[:3])) == 3
    assert ids[3] == ids[0]
    # Each closed once, with the exit code of the first call, before the next began.
    assert ends == [(run_id, int(job == 1)) for job, run_id in enumerate(ids)]
    assert [len(run_folders(folder)) for folder in folders] == [2, 1, 1]
    assert "WANDB_MODE" not in os.environ
    assert starts[0]["name"] == "train-seed=7"
    assert starts[0]["group"] == "train-2026-01-01_00-00-00"
    assert starts[0]["tags"] == ["dispatcher:alltoall", "overlap:none", "mine"]
    assert {start["mode"] for start in starts} == {"offline"}


@pytest.fixture
def recorded(monkeypatch):
    """The arguments of wandb.init, which is not run."""
    import wandb

    calls = []

    class Run:
        id = "x"

        def define_metric(self, *args, **kwargs):
            pass

    def init(**arguments):
        calls.append(arguments)
        return Run()

    monkeypatch.setattr(wandb, "init", init)
    return calls


def test_auto_is_online_with_a_netrc_entry(tmp_path, monkeypatch, recorded):
    netrc = tmp_path / "netrc"
    netrc.write_text("machine api.wandb.ai login user password " + "0" * 40 + "\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    build(tmp_path / "run", WANDB)
    assert recorded[0]["mode"] == "online"


def test_auto_leaves_wandb_mode_to_the_user_and_true_and_false_override_it(tmp_path, monkeypatch, recorded):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    for offline in ("auto", True, False):
        build(tmp_path / "run", {**WANDB, "offline": offline})
    assert [call["mode"] for call in recorded] == [None, "offline", "online"]


def test_group_falls_back_to_the_experiment(tmp_path, recorded):
    build(tmp_path / "run", WANDB, choices={**CHOICES, "experiment": "bias"})
    build(tmp_path / "run", {**WANDB, "group": "mine"})
    assert [call["group"] for call in recorded] == ["bias", "mine"]
    assert recorded[0]["name"] == "bias-run"


def test_a_missing_tensorboard_is_one_line_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^logger=tensorboard: .*pip install 'tensorboard") as error:
        build(tmp_path, {"_target_": "sidestream.lightning.loggers.tensorboard_logger"})
    assert "\n" not in str(error.value)


def test_names_of_jobs_stay_apart_when_their_overrides_are_long(tmp_path, recorded):
    for job in ("0-seed-1", "1-seed-2"):
        (tmp_path / job / ".hydra").mkdir(parents=True)
        long = "".join(f"- model.key{i}=value\n" for i in range(12))
        (tmp_path / job / ".hydra" / "overrides.yaml").write_text(f"{long}- seed={job[-1]}\n")
        build(tmp_path / job, WANDB)
    assert [call["name"] for call in recorded] == ["train-0-seed-1", "train-1-seed-2"]


def test_a_missing_wandb_is_one_line_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"^logger=wandb: .*pip install 'wandb") as error:
        build(tmp_path, WANDB)
    assert "\n" not in str(error.value)
