"""Every option composes, is typed and passes the check; the help names every group."""

import os
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from sidestream.config.compatibility import check
from sidestream.config.help import GROUPS, help_text
from sidestream.predict.predict import predict

CONF = Path(__file__).parents[2] / "conf"
OPTIONS = sorted(path.relative_to(CONF) for path in CONF.rglob("*.yaml"))
PREDICTED = ("cluster", "predict", "model/routing", "experiment/recipe")
Compose = Callable[..., DictConfig]


@pytest.mark.parametrize("option", OPTIONS, ids=str)
@pytest.mark.sample(12)
def test_an_option_is_typed_and_its_first_line_is_a_command_that_runs(compose: Compose, option: Path):
    # Hydra wants the package in the first line of a file that has one.
    line = (CONF / option).read_text().removeprefix("# @package _global_\n").splitlines()[0]
    command = shlex.split(line.removeprefix("# "))
    group = str(option.parent)
    trains = option.stem == "none"
    if (group.startswith(PREDICTED) and not trains) or option.stem in ("predict", "gpt_oss_120b"):
        predicts(compose, option, command)
        return
    script = "scripts/measure_overlap.py" if option.stem == "measure_overlap" else "train.py"
    assert command[:2] == ["python", script]
    if command[2:3] == ["-m"]:  # a study: what it sweeps stands in the file
        del command[2]
    if group == ".":
        cfg = compose(*command[2:], config_name=option.stem)
    else:
        cfg = compose(f"{group}={option.stem}", *command[2:])
    check(cfg, device_count=0)
    if group not in (".", "experiment", "arm"):
        assert hasattr(OmegaConf.get_type(cfg[group]), "__dataclass_fields__")
    assert "???" not in OmegaConf.to_yaml(cfg)


def predicts(compose: Compose, option: Path, command: list[str]) -> None:
    """The first line predicts, and fits."""
    assert command[:2] == ["python", "predict.py"]
    overrides = [f"strategy.{part}" if part.startswith("expert_par") else part for part in command[2:]]
    group, _, folder = str(option.parent).partition("/")
    chosen = f"{group}={folder}/{option.stem}" if folder else f"{group}={option.stem}"
    if option.parent.name in ("cluster", "model", "recipe"):
        assert chosen in overrides
    cfg = compose(*overrides, config_name="predict")
    predict(cfg, cluster="", model=option.stem)
    if option.parent.name == "routing":
        stated = OmegaConf.load(CONF / option)
        assert cfg.model == compose(f"model={option.stem}", config_name="predict").model
        assert all(cfg.router[key] == value for key, value in stated.items())


def test_lint_and_enabled_exist_in_every_graph_and_overlap_option(compose: Compose):
    for option in (CONF / "graph").glob("*.yaml"):
        assert compose(f"graph={option.stem}").graph.lint is False
    for option in (CONF / "overlap").glob("*.yaml"):
        assert compose(f"overlap={option.stem}").overlap.enabled is True


def test_a_users_own_option_may_have_any_keys(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(tmp_path)
    methods = "    def __init__(self, top_k, temperature): ...\n    def __call__(self, *_): ...\n"
    (tmp_path / "my_pkg.py").write_text(f"class Router:\n{methods}")
    router = tmp_path / "router"
    router.mkdir()
    (router / "mine.yaml").write_text("_target_: my_pkg.Router\ntop_k: 3\ntemperature: 0.5\n")
    search = f"hydra.searchpath=[file://{tmp_path}]"
    cfg = compose("router=mine", "trusted_targets=[my_pkg]", "router.temperature=2", search)
    check(cfg, device_count=0)
    assert cfg.router.temperature == 2


def test_a_resolved_config_passes_the_check_too(compose: Compose):
    cfg = compose("model=small")
    resolved = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
    assert check(resolved, device_count=0) == check(cfg, device_count=0)


def test_help_shows_names_of_files_as_text(tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a\x1b[2J.yaml").write_text("x: 1")
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert "a\\x1b[2J" in help_text() and "\x1b" not in help_text()


def test_help_has_one_line_per_group_and_no_schema(compose: Compose):
    lines = help_text().splitlines()
    for group, meaning in GROUPS.items():
        assert [line for line in lines if line.split()[:1] == [group] and line.endswith(meaning)], group
    assert "schema" not in help_text()
    assert any("allgather | alltoall | deep_ep | hybrid_ep | local | nccl_ep" in line for line in lines)


def test_choices_follow_the_cache_variable(compose: Compose, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SIDESTREAM_CACHE", "/elsewhere")
    assert compose().data.cache_dir == "/elsewhere"
    monkeypatch.delenv("SIDESTREAM_CACHE")
    assert os.path.expanduser(compose().data.cache_dir).startswith(str(Path.home()))
