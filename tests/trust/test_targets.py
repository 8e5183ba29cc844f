"""What a `_target_` may be: ours for its group, or a class of a package that the command line trusts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from sidestream import build
from sidestream.config import trust
from sidestream.config.construct import construct
from sidestream.config.errors import ConfigError

CONF = Path(__file__).parents[2] / "conf"

PACKAGE = """
import os, subprocess, functools
from subprocess import Popen
from torch.optim import SGD, Optimizer
from sidestream.routing.router import SoftmaxRouter
from sidestream.dispatch.base import Routing
from tests.trust.canary import Bird

class Router:
    def __init__(self, top_k=2, inner=None, text=None):
        self.top_k, self.inner, self.text = top_k, inner, text
    def __call__(self, *_): ...

class Balance:
    def loss(self, *_, **__): ...
    def commit(self, *_, **__): ...

class Shampoo(SGD): ...

class Step:
    def step(self): ...

class Outer:
    class Inner(Router): ...

def function(**options):
    raise AssertionError("a function was called")

made = functools.partial(Router)
"""


@pytest.fixture(autouse=True)
def my_pkg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_pkg").mkdir()
    (tmp_path / "my_pkg" / "__init__.py").write_text(PACKAGE)
    (tmp_path / "my_pkg" / "parts.py").write_text("from my_pkg import Router\nimport my_pkg\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    yield
    for name in ("my_pkg", "my_pkg.parts"):
        sys.modules.pop(name, None)


def config(key: str, target: Any, *trusted: str) -> Any:
    return OmegaConf.create({"trusted_targets": list(trusted), key: {"_target_": target}})


def refusal(key: str, target: Any, *trusted: str) -> str:
    with pytest.raises(ConfigError) as caught:
        trust.check_targets(config(key, target, *trusted))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_table_is_what_the_options_name() -> None:
    named: dict[str, set[str]] = {}
    for path in CONF.glob("*/*.yaml"):
        content = yaml.safe_load(path.read_text())
        for group, node in {path.parent.name: content, **content}.items():
            if isinstance(node, dict) and "_target_" in node:
                named.setdefault(group, set()).add(node["_target_"])
    measure = yaml.safe_load((CONF / "measure_overlap.yaml").read_text())["measure"]["_target_"]
    assert {**named, "measure": {measure}} == {group: set(part.ours) for group, part in trust.GROUPS.items()}


@pytest.mark.parametrize("group", trust.GROUPS)
def test_ours_exist_and_are_what_is_asked_of_others(group: str) -> None:
    part = trust.GROUPS[group]
    for target in part.ours:
        found = trust.find(f"{group}._target_", target, OmegaConf.create({}))
        if isinstance(found, type) and not target.endswith((".NoDispatcher", ".MegaExperts")):
            assert all(any(name in vars(base) for base in found.__mro__) for name in part.methods), target


def test_ours_are_accepted_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust.importlib, "import_module", None)
    for group, part in trust.GROUPS.items():
        for target in part.ours:
            trust.check_targets(config(group, target))


@pytest.mark.parametrize(
    ("group", "target", "why"),
    [
        ("optimizer", "torch.optim.optimizer.torch.hub.load", "is the module torch"),
        ("optimizer", "torch.hub.load", "not what optimizer builds"),
        ("optimizer", "torch.optim.lr_scheduler.LambdaLR", "not derived from torch.optim.Optimizer"),
        ("optimizer", "torch.optim.optimizer.warnings.warn", "is the module warnings"),
        ("optimizer", "torch.optim.AdamW.__init__", "no name of a class"),
        ("optimizer", "torch.optim.AdamW.load_state_dict", "no class"),
        ("optimizer", "torch.optim.optimizer._use_grad_for_differentiable", "no class"),
        ("optimizer", "os.system", "not from a trusted package"),
        ("router", "torch.nn.Linear", "not what router builds"),
        ("router", "torch.optim.AdamW", "not what router builds"),
        ("router", "sidestream.routing.balance.NoBalance", "not what router builds"),
        ("router", "sidestream.build.make", "not what router builds"),
        ("router", "sidestream.launch.failures.shutil.rmtree", "not what router builds"),
        ("router", "sidestream.tracking.folder.write_text_atomic", "not what router builds"),
        ("logger", "lightning.pytorch.loggers.wandb.os.system", "not from a trusted package"),
        ("logger", "sidestream.lightning.loggers.importlib.import_module", "not what logger builds"),
        ("measure", "sidestream.measure.overlap_run.save", "not what measure builds"),
        ("scheduler", "hydra.utils.call", "not from a trusted package"),
        ("data", "builtins.eval", "not from a trusted package"),
        ("graph", "sidestream\uff0egraph.none.NoGraph", "no name of a class"),
        ("graph", "\u0455idestream.graph.none.NoGraph", "not from a trusted package"),
        ("graph", "sidestream.graph.none.NoGraph\x1b[2J", "no name of a class"),
        ("graph", "sidestream", "no name of a class"),
        ("graph", "sidestream..none", "no name of a class"),
        ("graph", 7, "no name of a class"),
        ("graph", ["sidestream.graph.none.NoGraph"], "no name of a class"),
        ("graph", None, "no name of a class"),
        ("model", "sidestream.graph.none.NoGraph", "nothing is built here"),
        ("trainer", "os.system", "nothing is built here"),
    ],
)
def test_without_trust_only_what_the_group_builds(group: str, target: Any, why: str) -> None:
    line = refusal(group, target)
    assert why in line, line
    assert line.isprintable()


@pytest.mark.parametrize(
    ("group", "target", "why"),
    [
        ("router", "my_pkg.os.system", "is the module os"),
        ("router", "my_pkg.Popen", "defined in subprocess"),
        ("router", "my_pkg_of_others.Router", "not from a trusted package"),
        ("router", "my_pkg.subprocess.Popen", "is the module subprocess"),
        ("router", "my_pkg.parts.my_pkg.os.system", "is the module os"),
        ("router", "my_pkg.function", "no class"),
        ("router", "my_pkg.made", "no class"),
        ("router", "my_pkg.__builtins__.eval", "no name of a class"),
        ("router", "my_pkg.Router.__call__", "no name of a class"),
        ("router", "my_pkg.Balance", "without __call__"),
        ("router", "my_pkg.Bird", "defined in tests.trust.canary"),
        ("router", "my_pkg.Missing", "cannot be found"),
        ("router", "my_pkg.Routing", "defined in sidestream"),
        ("optimizer", "my_pkg.Step", "not derived from torch.optim.Optimizer"),
        ("measure", "my_pkg.os.system", "is the module os"),
    ],
)
def test_a_trusted_package_gives_its_own_classes_only(group: str, target: str, why: str) -> None:
    assert why in refusal(group, target, "my_pkg")


@pytest.mark.parametrize(
    ("group", "target", "trusted"),
    [
        ("router", "my_pkg.Router", "my_pkg"),
        ("router", "my_pkg.parts.Router", "my_pkg.parts"),
        ("router", "my_pkg.Outer.Inner", "my_pkg."),
        ("router", "my_pkg.SoftmaxRouter", "my_pkg"),
        ("balance", "my_pkg.Balance", "my_pkg"),
        ("optimizer", "my_pkg.Shampoo", "my_pkg"),
        ("logger", "my_pkg.function", "my_pkg"),
        ("optimizer", "torch.optim.RMSprop", ""),
        ("optimizer", "torch.optim.adamw.AdamW", ""),
    ],
)
def test_what_may_be_built(group: str, target: str, trusted: str) -> None:
    trust.check_targets(config(group, target, *filter(None, [trusted])))


def test_the_one_who_builds_checks_again() -> None:
    cfg = config("optimizer", "torch.optim.optimizer.torch.hub.load")
    with pytest.raises(ConfigError, match="is the module torch"):
        build.make(cfg, "optimizer", partial=True)


@pytest.mark.parametrize("inner", [{"_target_": "my_pkg.function"}, [{"deep": {"_target_": "os.system"}}]])
def test_what_is_nested_in_arguments_is_checked(inner: Any) -> None:
    cfg = config("router", "my_pkg.Router", "my_pkg")
    cfg.router.inner = inner
    with pytest.raises(ConfigError, match=r"^router\.inner"):
        build.make(cfg, "router")
    cfg.router.inner = None
    cfg.router._args_ = [1, inner]
    with pytest.raises(ConfigError, match=r"^router\._args_\.1"):
        build.make(cfg, "router")


def test_an_interpolated_target_is_checked() -> None:
    cfg = config("router", "${name}")
    cfg.name = "os.system"
    with pytest.raises(ConfigError, match=r"os\.system: this class is not"):
        trust.check_targets(cfg)


def test_parts_are_built_with_their_arguments_and_text_stays_text() -> None:
    cfg = config("router", "my_pkg.Router", "my_pkg")
    cfg.router.top_k = 5
    cfg.router.inner = [{"_target_": "my_pkg.Outer.Inner", "top_k": 3}, {"plain": 1}]
    cfg.router.text = "\\${oc.env:HOME}"
    built = build.make(cfg, "router", top_k=7)
    assert (built.top_k, built.inner[0].top_k, built.inner[1]) == (7, 3, {"plain": 1})
    assert built.text == "${oc.env:HOME}"
    made = construct("router", cfg.router, cfg, partial=True)
    assert made().top_k == 5 and type(made().inner) is list


@pytest.mark.parametrize(
    ("words", "trusted"),
    [
        ([], []),
        (["trusted_targets=[]"], []),
        (["trusted_targets=my_pkg"], ["my_pkg"]),
        (["trusted_targets=[a, 'b.c',\"d\"]"], ["a", "b.c", "d"]),
        (["trusted_targets=[a]", "seed=1", "++trusted_targets=[b]"], ["b"]),
        (["xtrusted_targets=[a]", "~trusted_targets"], []),
    ],
)
def test_the_command_line_says_what_is_trusted(words: list[str], trusted: list[str]) -> None:
    assert trust.believed(words) == trusted


@pytest.mark.parametrize("word", ["${oc.env:X}", "a b", "a-b", "__main__", "a..b", "${name}"])
def test_a_trusted_package_is_written_out(word: str) -> None:
    with pytest.raises(ConfigError, match="is no name"):
        trust.believed([f"trusted_targets=[{word}]"])


def test_the_users_settings_count_and_nothing_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "config" / "sidestream"
    folder.mkdir(parents=True)
    (folder / "settings.yaml").write_text("trusted_targets: [my_pkg]\n")
    assert trust.believed(["trusted_targets=[a]"]) == ["a", "my_pkg"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", "config")
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    assert trust.believed([]) == []


@pytest.mark.parametrize(
    "content", ["trusted_targets: 7\n", "other: 1\n", "- a\n", "\x00", "a: &x [1]\nb: *x\n"]
)
def test_settings_that_say_something_else_are_one_line(content: str, tmp_path: Path) -> None:
    folder = tmp_path / "config" / "sidestream"
    folder.mkdir(parents=True)
    (folder / "settings.yaml").write_text(content)
    with pytest.raises(ConfigError, match=r"^settings=.*settings\.yaml"):
        trust.believed([])
