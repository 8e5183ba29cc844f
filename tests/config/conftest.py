from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import DictConfig

from sidestream.launch import entry

CONF = Path(__file__).parents[2] / "conf"
Compose = Callable[..., DictConfig]


@pytest.fixture
def compose() -> Iterator[Compose]:
    """Returns a function from overrides to the root config of train.py, or of `config_name`."""
    entry.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield lambda *overrides, config_name="train": hydra_compose(config_name, list(overrides))
