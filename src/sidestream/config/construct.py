"""A checked option -> its object."""

from __future__ import annotations

import functools
from typing import Any

from omegaconf import DictConfig, OmegaConf

from sidestream.config import trust

_OF_HYDRA = ("_target_", "_args_", "_partial_", "_recursive_", "_convert_")


def construct(group: str, node: DictConfig, cfg: DictConfig, *, partial: bool = False, **kwargs: Any) -> Any:
    """Calls what an option names with the option's keys; plain containers, no OmegaConf objects in them.

    In place of `hydra.utils.instantiate`, which evaluates `${...}` a second time and so would change a user's text.

    Args:
        node: The option, with its `_target_`.
        cfg: The root config.
        partial: Returns a function that makes the object.
        kwargs: Arguments beside or instead of the option's keys.

    Raises:
        ConfigError: the group may not build what the option names, see `trust.check_targets`.
    """
    trust.check_part(group, node, cfg)
    plain: Any = OmegaConf.to_container(node, resolve=True)
    make = _bound(group, plain, cfg, kwargs)
    return make if partial or plain.get("_partial_") else make()


def _bound(key: str, plain: dict[str, Any], cfg: DictConfig, kwargs: dict[str, Any]) -> functools.partial:
    called = trust.find(f"{key}._target_", plain["_target_"], cfg)
    own = {name: value for name, value in plain.items() if name not in (*_OF_HYDRA, *kwargs)}
    positional = plain.get("_args_", [])
    if plain.get("_recursive_", True):
        own, positional = _built(key, own, cfg), _built(f"{key}._args_", positional, cfg)
    return functools.partial(called, *positional, **own, **kwargs)


def _built(key: str, value: Any, cfg: DictConfig) -> Any:
    """Returns an argument with the objects that it describes in place of their descriptions."""
    if isinstance(value, list):
        return [_built(f"{key}.{place}", item, cfg) for place, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if "_target_" not in value:
        return {name: _built(f"{key}.{name}", item, cfg) for name, item in value.items()}
    make = _bound(key, value, cfg, {})
    return make if value.get("_partial_") else make()
