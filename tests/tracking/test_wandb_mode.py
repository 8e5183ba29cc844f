"""What a folder may say to wandb."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sidestream.config.errors import ConfigError
from sidestream.tracking.wandb_mode import check_folder


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    (tmp_path / "wandb").mkdir()
    return tmp_path / "wandb" / "settings"


def test_what_wandb_init_writes_is_taken(settings: Path) -> None:
    check_folder()
    settings.write_text("[default]\nentity = me\nproject = mine\nbase_url = https://api.wandb.ai\n")
    check_folder()


def test_a_server_of_a_folder_is_not_sent_the_key(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.write_text("[default]\nbase_url = https://example.org\n")
    with pytest.raises(ConfigError, match=r"wandb/settings of the current folder sets base_url"):
        check_folder()
    monkeypatch.setenv("WANDB_BASE_URL", "https://mine.example.org")
    check_folder()
    settings.write_text("[default]\nhttps_proxy = http://example.org\n")
    with pytest.raises(ConfigError, match="https_proxy"):
        check_folder()


def test_a_pipe_is_not_waited_for(settings: Path) -> None:
    os.mkfifo(settings)
    with pytest.raises(ConfigError, match="not a regular file"):
        check_folder()
