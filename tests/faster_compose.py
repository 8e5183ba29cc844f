"""Compositions for tests, which compose thousands of times: Hydra takes 0.3 s of a processor for each.

What Hydra reads from a file, and what it makes of the same choices of options, is kept and copied; only the keys that
were typed are applied anew. A test's own files may change and are always read.
"""

import copy
import dataclasses
from typing import Any

from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository

_read = ConfigRepository.load_config
_listed = defaults_list.create_defaults_list
_merged = ConfigLoaderImpl._compose_config_from_defaults_list
_interpolations = defaults_list._create_interpolation_map
_kept: dict[Any, Any] = {}


def install() -> None:
    ConfigRepository.load_config = _load_config  # type: ignore[method-assign]
    ConfigLoaderImpl._compose_config_from_defaults_list = _compose  # type: ignore[method-assign]
    config_loader_impl.create_defaults_list = _create_defaults_list
    defaults_list._create_interpolation_map = _create_interpolation_map


def _places(repo: Any) -> tuple[str, ...] | None:
    """Where options come from; None: also from a test's own files."""
    found = tuple(str(source.path) for source in repo.get_sources())
    return None if any("pytest" in path for path in found) else found


def _load_config(self: Any, config_path: str) -> Any:
    key = ("file", places := _places(self), config_path)
    if places is None:
        return _read(self, config_path)
    if key not in _kept:
        _kept[key] = _read(self, config_path)
    if (found := _kept[key]) is None:
        return None
    return dataclasses.replace(
        found, config=copy.deepcopy(found.config), defaults_list=copy.deepcopy(found.defaults_list)
    )


def _create_defaults_list(repo: Any, config_name: Any, overrides_list: Any, **how: Any) -> Any:
    typed = defaults_list.Overrides(repo=repo, overrides_list=overrides_list).config_overrides
    choices = [override for override in overrides_list if not any(override is key for key in typed)]
    key = ("list", places := _places(repo), config_name, *(o.input_line for o in choices), *how.values())
    if places is None:
        return _listed(repo, config_name, overrides_list, **how)
    if key not in _kept:
        _kept[key] = _listed(repo, config_name, choices, **how)
    return dataclasses.replace(_kept[key], config_overrides=typed)


def _compose(self: Any, defaults: Any, repo: Any) -> Any:
    key = ("config", places := _places(repo), *(repr(default) for default in defaults))
    if places is None:
        return _merged(self, defaults, repo)
    if key not in _kept:
        _kept[key] = _merged(self, defaults, repo)
    return copy.deepcopy(_kept[key])


def _create_interpolation_map(overrides: Any, defaults: Any, self_added: bool) -> Any:
    """Needed where an entry of a defaults list has an interpolation; made by Hydra for every entry."""
    return _interpolations(overrides, defaults, self_added) if "${" in str(defaults) else {}
