"""One thread per process, set before torch is imported: results then do not depend on the number of cores."""

import copy
import dataclasses
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


def _read_each_config_file_once() -> None:
    """Hydra parses every YAML file anew in every composition, a third of its time; tests compose a thousand times."""
    from hydra._internal.config_repository import ConfigRepository

    read, known = ConfigRepository.load_config, {}

    def load_config(self: Any, config_path: str) -> Any:
        key = (tuple(source.path for source in self.get_sources()), config_path)
        if any("pytest" in str(path) for path in key[0]):  # a test's own files may change
            return read(self, config_path)
        if key not in known:
            known[key] = read(self, config_path)
        found = known[key]
        if found is None:
            return None
        parts = {name: copy.deepcopy(getattr(found, name)) for name in ("config", "defaults_list")}
        return dataclasses.replace(found, **parts)

    ConfigRepository.load_config = load_config  # type: ignore[method-assign]


_read_each_config_file_once()


@pytest.fixture(autouse=True)
def forget_own_packages() -> Iterator[None]:
    """Many tests write a package `my_pkg` of their own: the next one is not given the last one's."""
    yield
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]
