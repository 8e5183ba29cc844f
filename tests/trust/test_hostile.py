"""Hostile run folders against what reads them, in this process; `test_attack.py` starts the commands."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from sidestream.compare.errors import CompareError
from sidestream.compare.runs import read_folders
from sidestream.config.compatibility import check
from sidestream.config.errors import ConfigError
from sidestream.launch import record, resume, stored, sweeps
from sidestream.launch.sweeps import _earlier, _result
from sidestream.tracking.folder import RunFolder
from tests.trust.hostile import ATTACKS, make_run


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("honest") / "run")


@pytest.fixture
def run(honest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SECRET", "the secret")
    monkeypatch.setattr(sweeps, "again", None)
    monkeypatch.setattr(sweeps.cli, "module", lambda: "train")
    return Path(shutil.copytree(honest, tmp_path / "run"))


def test_an_honest_folder_is_read(run: Path) -> None:
    assert check(stored.read_config(run, trusted=[])).world_size == 1
    assert "trainer.devices=1" in resume.rewrite([f"resume={run}"])
    assert "trainer.devices=1" in sweeps.rewrite([f"resume_sweep={run}"])
    stored.refuse_links(run, "resume")


def message_of(read: Callable[[], object]) -> list[str]:
    try:
        read()
    except (ConfigError, CompareError) as error:
        return [str(error)]
    return []


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_folder_is_one_line_or_data(name: str, run: Path, capfd: pytest.CaptureFixture) -> None:
    canary, said = run.parent / "canary", list[str]()
    ATTACKS[name](run, canary)

    def evaluate() -> None:
        cfg = stored.read_config(run, trusted=[])
        with stored.refused(run):
            check(cfg)
        assert "the secret" not in str(OmegaConf.to_container(cfg, resolve=True))

    for reader in (
        evaluate,
        lambda: resume.rewrite([f"resume={run}"]),
        lambda: sweeps.rewrite([f"resume_sweep={run}"]),
    ):
        said += message_of(reader)
    for read in (_earlier, _result, lambda folder: RunFolder(folder).read_result()):
        read(run)
    said += message_of(lambda: said.extend(item.reason for item in read_folders([run])[1]))
    assert all(line.isprintable() for line in said)
    assert not canary.exists()
    printed = "".join(capfd.readouterr())
    assert all(c.isprintable() or c == "\n" for c in printed), printed
    assert "the secret" not in printed


def test_text_of_a_config_stays_text(run: Path) -> None:
    plain = {"name": "${oc.env:SECRET}", "list": ["${", "\\${x}", "a}${b"], "number": 1.0e-8, "text": "1e-3"}
    record.save_resolved(run, plain)
    read = record.load_resolved(run)
    assert read == {**plain, "trusted_targets": []}
    assert OmegaConf.to_container(record.as_config(plain), resolve=True) == plain
    assert record.as_config(plain).name == "${oc.env:SECRET}"
