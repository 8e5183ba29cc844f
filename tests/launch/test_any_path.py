"""Where ranks meet is a path, not a URL: every character of it counts."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sidestream.launch.worker import RankEnv
from sidestream.parallel.world import join_world


@pytest.mark.parametrize("name", ["plain", "a#b", "a?b=c", "100%", "%20", "mit Leer", "ü", "a::b", "x;y&z"])
def test_ranks_meet_in_the_file_that_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    given: dict[str, Any] = {}
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: given.update(options))
    store = tmp_path / name / "store"
    store.parent.mkdir()
    env = RankEnv(0, 0, 1, 1, f"file://{store}")
    assert join_world(env, torch.device("cpu"), timeout=timedelta(seconds=9))
    assert given["store"].path == str(store)
    given["store"].set("key", "value")
    assert store.is_file(), "it was made elsewhere"
