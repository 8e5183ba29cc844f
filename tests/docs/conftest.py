from collections.abc import Callable, Iterator

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import DictConfig

from sidestream.launch import entry
from tests.docs.pages import REPOSITORY


@pytest.fixture
def compose() -> Iterator[Callable[..., DictConfig]]:
    """Returns a function from overrides to the root config of train.py, or of `config_name`."""
    entry.register()
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):

        def compose(*overrides: str, config_name: str = "train", **options: object) -> DictConfig:
            return hydra_compose(config_name, list(overrides), **options)

        yield compose
