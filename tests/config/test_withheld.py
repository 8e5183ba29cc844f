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
    assert (stored["number"], stored["unset"], stored["cache"]) == (3, "fallback", "/cache")

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


def test_the_resolver_is_back_afterwards(environment: None) -> None:
    cfg = OmegaConf.create({"a": "${oc.env:MY_TOKEN}"})
    assert withheld.find(cfg, {"a": SECRET}) and cfg.a == SECRET
