"""What the tests compose is what Hydra composes: see tests/faster_compose.py."""

from collections.abc import Callable
from typing import Any

import pytest
from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from omegaconf import DictConfig, OmegaConf

from tests import faster_compose

Compose = Callable[..., DictConfig]


def as_hydra(patch: pytest.MonkeyPatch) -> None:
    """Takes away what makes compositions fast."""
    patch.setattr(ConfigRepository, "load_config", faster_compose._read)
    patch.setattr(config_loader_impl, "create_defaults_list", faster_compose._listed)
    patch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", faster_compose._merged)
    patch.setattr(defaults_list, "_create_interpolation_map", faster_compose._interpolations)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["optimizer.lr=0.5", "router.top_k=1"],
        ["overlap=shortcut", "dispatcher=nccl_ep", "overlap.slot=1"],
        ["experiment=olmoe_1b_7b", "trainer.max_steps=3"],
        ["model.moe_layers=[1]", "+data.more=1", "~scheduler.warmup_steps"],
        ["optimizer.lr=nonsense"],
        ["dispatcher=nonsense"],
        ["dispacher=nccl_ep"],
    ],
    ids=" ".join,
)
@pytest.mark.sample(3)
def test_a_kept_composition_is_that_of_hydra(
    compose: Compose, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def composed() -> Any:
        try:
            return OmegaConf.to_container(compose(*overrides, config_name="train"))
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    compose("optimizer.lr=0.25", "seed=7")  # leaves nothing in what is kept
    kept = [composed(), composed()]
    with monkeypatch.context() as patch:
        as_hydra(patch)
        hydras = composed()
    assert kept == [hydras, hydras]
