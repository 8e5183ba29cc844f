"""What a new command line takes over from a folder, and what Hydra may build for a config."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from sidestream.config.errors import ConfigError
from sidestream.config.hydra_trust import check_hydra
from sidestream.launch import entry, resume, stored, sweeps, taken

CONF = Path(__file__).parents[2] / "conf"
LAYOUT = {
    "world_size": 1,
    "local_world_size": 1,
    "expert_parallel_size": 1,
    "expert_data_parallel_size": 1,
    "micro_batch_size": 4,
    "accumulation": 1,
    "device_type": "cpu",
}
HOSTILE = [
    "+hydra.callbacks.evil._target_=os.system",
    "hydra.run.dir=/tmp/elsewhere",
    "hydra/launcher=evil",
    "+hydra/callbacks=evil",
    "hydra.searchpath=[file:///tmp/evil]",
    "~hydra.callbacks",
    "+router@hydra.callbacks=evil",
    "+experiment@hydra:router=evil",
    "--config-dir=/tmp/evil",
    "-cd",
    "--multirun",
    "-cn=evil",
    "trusted_targets=[torch]",
    "++trusted_targets.0=torch",
    "resume=/tmp/other",
    "no_such_group=1",
    "schema/router=x",
    "name=${oc.env:HOME}",
    "name=${${seed}:x}",
    "experiment=../../tmp/evil",
    "model/routing=../evil",
    "",
    "=1",
    "\x1b[2J=1",
]
HONEST = [
    "model=small",
    "model.num_layers=3",
    "+router.temperature=2",
    "++router._target_=my_pkg.Router",
    "~balance.coefficient",
    "experiment=recipe/deepseek_v3_gb300",
    "+model/routing@router=olmoe_1b_7b",
    "name=run-${seed}",
    "data.files=['/my text/a=b.txt']",
    "data.files=[../text.txt]",
    "data.separator='\n\n'",
    "seed=1,2",
    "measure.rounds=3",
    "initial_weights=/x",
]


def run_folder(folder: Path, overrides: list[str], flags: tuple[str, ...] = ()) -> Path:
    (folder / ".hydra").mkdir(parents=True)
    (folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    launch = {"command": "python train.py", "overrides": overrides, "flags": list(flags), "choices": {}}
    (folder / ".hydra" / "launch.json").write_text(json.dumps({**launch, "layout": LAYOUT}))
    return folder


def sweep_folder(folder: Path, task: list[str], of_hydra: list[str]) -> Path:
    folder.mkdir()
    hydra = {
        "overrides": {"task": task, "hydra": of_hydra},
        "job": {"config_name": sweeps.cli.module()},
        "runtime": {"config_sources": []},
    }
    (folder / "multirun.yaml").write_text(OmegaConf.to_yaml({"hydra": hydra}))
    return folder


@pytest.mark.parametrize("part", HOSTILE)
def test_what_could_run_something_is_left_out_and_said(
    part: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeps, "again", None)
    run = run_folder(tmp_path / "run", ["seed=7", part])
    sweep = sweep_folder(tmp_path / "sweep", ["seed=7"], [part])
    for rewrite, argument in ((resume.rewrite, f"resume={run}"), (sweeps.rewrite, f"resume_sweep={sweep}")):
        argv = rewrite([argument])
        assert "seed=7" in argv and part not in argv
        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith("note: resume") and "type it again" in said
        assert said.isprintable()


def test_known_keys_are_taken_over_without_a_word(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert taken.take(HONEST, folder=tmp_path, option="resume") == HONEST
    assert capsys.readouterr().err == ""


def test_what_is_typed_again_is_the_users(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = run_folder(tmp_path / "run", ["trusted_targets=[torch]", "hydra.x=1"], ("--config-dir", "/a"))
    typed = ["-cd", "my_conf", "trusted_targets=[my_pkg]", "hydra.x=2", f"resume={run}"]
    assert resume.rewrite(typed)[:4] == ["-cd", "my_conf", "trusted_targets=[my_pkg]", "hydra.x=2"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "7",
        "{",
        "{}",
        '{"overrides": "seed=1"}',
        json.dumps(
            {"command": "", "overrides": [1], "flags": [], "choices": {}, "layout": LAYOUT},
        ),
        json.dumps(
            {"command": "", "overrides": [], "flags": "--cd", "choices": {}, "layout": LAYOUT},
        ),
        json.dumps(
            {
                "command": "",
                "overrides": [],
                "flags": [],
                "choices": {},
                "layout": {**LAYOUT, "world_size": 1e30},
            },
        ),
        "[" * 100_000,
    ],
)
def test_another_launch_json_is_one_line(content: str, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", [])
    (run / ".hydra" / "launch.json").write_text(content)
    with pytest.raises(ConfigError, match=r"^resume=.*launch\.json"):
        resume.rewrite([f"resume={run}"])


@pytest.mark.parametrize(
    "name", ["rank0.log", ".hydra/resolved.0.yaml", "checkpoints/step-00000002", "metrics.jsonl"]
)
@pytest.mark.parametrize("there", [True, False])
def test_a_run_with_a_link_out_of_it_is_not_written_to(name: str, there: bool, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", [])
    stored.refuse_links(run, "resume")
    (run / "inside").symlink_to(".hydra")
    stored.refuse_links(run, "resume")
    if there:
        (tmp_path / "bashrc").write_text("")
    (run / name).symlink_to(tmp_path / "bashrc")
    with pytest.raises(ConfigError, match="is a link that leads out of it"):
        stored.refuse_links(run, "resume")


@pytest.fixture
def compose(tmp_path: Path) -> Iterator[Callable[..., DictConfig]]:
    """Composes with options of a folder that somebody gave us."""
    entry.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        search = f"hydra.searchpath=[file://{tmp_path}]"
        yield lambda *overrides: hydra_compose("train", [search, *overrides], return_hydra_config=True)


def option(folder: Path, text: str) -> None:
    (folder / "experiment").mkdir()
    (folder / "experiment" / "given.yaml").write_text(f"# @package _global_\n{text}\n")


def test_trust_in_a_file_is_not_believed(
    tmp_path: Path, compose: Callable[..., DictConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    option(tmp_path, "trusted_targets: [torch]")
    assert compose("experiment=given").trusted_targets == []
    assert compose("experiment=given", "trusted_targets=[my_pkg]").trusted_targets == ["my_pkg"]
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "config" / "sidestream").mkdir(parents=True)
    (tmp_path / "config" / "sidestream" / "settings.yaml").write_text("trusted_targets: [mine]")
    assert compose("experiment=given").trusted_targets == ["mine"]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("hydra: {callbacks: {evil: {_target_: os.system}}}", "hydra.callbacks.evil._target_"),
        ("hydra: {callbacks: {evil: {_target_: sidestream.run.train}}}", "hydra.callbacks.evil._target_"),
        ("hydra: {callbacks: {evil: {_target_: '${name}'}}}", "hydra.callbacks.evil._target_"),
        (
            "hydra: {callbacks: {before_run: {x: {_target_: os.system}}}}",
            "hydra.callbacks.before_run.x._target_",
        ),
        ("hydra: {launcher: {_target_: os.system}}", "hydra.launcher._target_"),
        ("hydra: {job_logging: {formatters: {x: {(): os.system}}}}", "hydra.job_logging.formatters.x.()"),
        (
            "hydra: {hydra_logging: {handlers: {x: {class: os.system}}}}",
            "hydra.hydra_logging.handlers.x.class",
        ),
        (
            "hydra: {job_logging: {handlers: {x: {stream: 'ext://os.system'}}}}",
            "hydra.job_logging.handlers.x.stream",
        ),
        (
            "hydra: {job_logging: {handlers: {x: {filename: /tmp/x}}}}",
            "hydra.job_logging.handlers.x.filename",
        ),
        ("hydra: {job: {env_set: {LD_PRELOAD: /tmp/x.so}}}", "hydra.job.env_set.LD_PRELOAD"),
        ("hydra: {output_subdir: ../../x}", "hydra.output_subdir"),
        ("hydra: {sweeper: {params: {trusted_targets: '[[torch]]'}}}", "trusted_targets"),
        (
            "hydra: {sweeper: {params: {+hydra.callbacks.x._target_: os.system}}}",
            "hydra.callbacks.x._target_",
        ),
    ],
)
@pytest.mark.sample(5)
def test_hydra_builds_and_does_nothing_for_a_file(
    text: str, key: str, tmp_path: Path, compose: Callable[..., DictConfig]
) -> None:
    option(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        compose("experiment=given")
    assert refused.value.key == key


def test_what_hydra_and_we_ship_is_no_fault(tmp_path: Path, compose: Callable[..., DictConfig]) -> None:
    option(tmp_path, "hydra: {sweeper: {params: {router._target_: 'a.B,c.D', seed: '1,2'}}}")
    cfg = compose(
        "experiment=given", "hydra/job_logging=default", "hydra/launcher=basic", "+hydra.job.env_set={A: b}"
    )
    check_hydra(cfg.hydra, typed=["+hydra.job.env_set={A: b}"], trusted=[])
