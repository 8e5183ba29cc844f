"""Values of the environment stay names in what is stored and sent, and are values where they are used."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from sidestream.config import withheld
from sidestream.launch import arguments
from sidestream.launch.record import as_config, load_resolved, save_resolved

SECRET = "hunter2-\u00e9"
CONFIG = {
    "name": "x",
    "a": {
        "token": "${oc.env:MY_TOKEN}",
        "again": "${.token}",
        "url": "https://u:${oc.env:MY_TOKEN}@h/${name}",
    },
    "list": ["plain", "${oc.env:MY_TOKEN}", {"deep": "${a.token}"}],
    "copy": "${a}",
    "number": "${oc.decode:${oc.env:MY_COUNT}}",
    "unset": "${oc.env:NOT_THERE,fallback}",
    "cache": "${oc.env:SIDESTREAM_CACHE,here}",
    "literal": "text \\${oc.env:MY_TOKEN} of a user",
}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MY_TOKEN": SECRET, "MY_COUNT": "3", "SIDESTREAM_CACHE": "/cache"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(withheld.VARIABLE, "[]")


def test_secrets_are_stored_as_names_and_reach_the_ranks_as_values(environment: None, tmp_path: Path) -> None:
    cfg = OmegaConf.create(CONFIG)
    evaluated = OmegaConf.to_container(cfg, resolve=True)
    assert evaluated["a"]["token"] == SECRET
    found = withheld.find(cfg, evaluated)
    stored = withheld.names(evaluated, found)
    (tmp_path / ".hydra").mkdir()
    save_resolved(tmp_path, stored)
    text = (tmp_path / ".hydra" / "resolved.yaml").read_text()
    assert SECRET not in text and "hunter2" not in text
    assert stored["a"]["url"] == "https://u:${oc.env:MY_TOKEN}@h/x"
    assert stored["list"] == ["plain", "${oc.env:MY_TOKEN}", {"deep": "${oc.env:MY_TOKEN}"}]
    assert stored["copy"] == stored["a"]
    assert (stored["number"], stored["unset"]) == ("${oc.decode:${oc.env:MY_COUNT}}", "fallback")
    assert stored["cache"] == "/cache"

    withheld.publish(found)  # a rank has the environment of the process that started it
    read = load_resolved(tmp_path)
    used = OmegaConf.to_container(as_config(withheld.values(read, withheld.published())), resolve=True)
    assert {key: used[key] for key in evaluated} == evaluated
    assert withheld.names(used, withheld.published())["a"] == stored["a"]


def test_a_folder_alone_gives_no_value(environment: None, tmp_path: Path) -> None:
    """Somebody else's file names a variable of ours: it stays text."""
    (tmp_path / ".hydra").mkdir()
    save_resolved(tmp_path, {"a": {"token": "${oc.env:MY_TOKEN}"}})
    read = withheld.values(load_resolved(tmp_path), withheld.published())
    assert as_config(read).a.token == "${oc.env:MY_TOKEN}"


def test_what_was_handed_over_fits_only_where_its_name_is(environment: None) -> None:
    withheld.publish([(["a", "b"], "${oc.env:X}", "value"), (["gone", 3], "${oc.env:X}", "value")])
    assert withheld.values({"a": {"b": "mine"}}, withheld.published()) == {"a": {"b": "mine"}}
    assert json.loads(os.environ[withheld.VARIABLE])


def test_overrides_are_kept_as_typed_and_are_no_part_of_a_name(
    environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    word = "data.cache_dir2=${oc.env:MY_TOKEN}"
    hydra = OmegaConf.create({"number": 3, "overrides": {"task": [word, "seed=1", "name=a-${number}"]}})
    assert arguments.of_task(hydra) == [word, "seed=1", "name=a-3"]
    monkeypatch.setattr("sys.argv", ["train.py", "-m", word, "seed=1,2"])
    assert arguments.job_label(hydra.overrides.task) == "seed-1"


def spell(text: str, *more: str) -> str:
    """What a resolver of a user's may do with a text: the name alone is not enough for it."""
    if not text.startswith("hunter2"):
        raise KeyError(text)
    return text.upper()


@pytest.mark.parametrize(
    "value",
    [
        "${oc.decode:${oc.env:MY_TOKEN}}",
        "https://u:${oc.decode:${oc.env:MY_TOKEN}}@host/${name}",
        "${spell:${oc.env:MY_TOKEN}}",
        "${hidden:${oc.env:MY_TOKEN}}",
        "${part:${oc.env:MY_TOKEN}}",
        "${oc.create:{deep:{er:${oc.decode:${oc.env:MY_TOKEN}}}}}",
        "${made:${oc.env:MY_TOKEN}}",
        "${oc.dict.values:hidden}",
        "${hidden}",
        "${oc.decode:${oc.env:${which}}}",
        ["${spell:${oc.env:MY_TOKEN}}", "plain"],
        "${oc.decode:${oc.env:MY_PIN}}",
    ],
)
def test_what_a_name_cannot_be_put_into_is_withheld_too(
    value: object, environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails closed: a value that only the variable's value gives is stored as it was typed."""
    monkeypatch.setenv("MY_TOKEN", "hunter2")
    monkeypatch.setenv("MY_PIN", "4711")
    resolvers = {
        "spell": spell,
        "hidden": lambda text: text.encode().hex(),
        "part": lambda text: text[1:5],
        "made": lambda text: {text: 1},
    }
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)
    hidden = {"x": "${oc.decode:${oc.env:MY_TOKEN}}"}
    cfg = OmegaConf.create({"key": value, "name": "n", "which": "MY_TOKEN", "hidden": hidden})
    evaluated = OmegaConf.to_container(cfg, resolve=True)
    found = withheld.find(cfg, evaluated)
    stored = withheld.names(evaluated, found)
    for secret in ("hunter2", "HUNTER2", "4711", "unte", b"hunter2".hex()):
        assert secret not in json.dumps(stored)
    assert stored["name"] == "n" and "${" in json.dumps(stored["key"])
    withheld.publish(found)
    assert withheld.values(stored, withheld.published()) == evaluated
    for name in resolvers:
        OmegaConf.clear_resolver(name)


def test_what_does_not_come_from_the_environment_stays_and_so_do_numbers_of_the_run(
    environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter(range(100))
    OmegaConf.register_new_resolver("tick", lambda: f"at {next(ticks)}", replace=True)
    config = {
        "seed": "${oc.decode:${oc.env:MY_COUNT}}",
        "optimizer": {"betas": ["${oc.decode:0.${oc.env:MY_COUNT}}", 0.5]},
        "router": {"mine": "${oc.decode:${oc.env:MY_COUNT}}"},
        "when": "${tick:}",
        "home": "${oc.decode:${oc.env:SIDESTREAM_CACHE}}",
        "token": "${oc.env:MY_TOKEN}",
        "missing": "???",
    }
    cfg = OmegaConf.create(config)
    evaluated = OmegaConf.to_container(cfg, resolve=True)
    stored = withheld.names(evaluated, withheld.find(cfg, evaluated))
    assert stored == {**evaluated, "token": "${oc.env:MY_TOKEN}"} and stored["seed"] == 3
    OmegaConf.clear_resolver("tick")


def test_the_resolver_is_back_afterwards(environment: None) -> None:
    cfg = OmegaConf.create({"a": "${oc.env:MY_TOKEN}"})
    assert withheld.find(cfg, {"a": SECRET}) and cfg.a == SECRET
