"""A checked option -> its object."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from sidestream.config import trust
from sidestream.config.errors import ConfigError

_OF_HYDRA = ("_target_", "_args_", "_partial_", "_recursive_", "_convert_")
# What a group's class is given beside the option's keys: positional, by name; and the keys that it is not given.
_GIVEN: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "optimizer": (("parameters",), ()),
    "scheduler": ((), ("max_steps",)),
    "logger": (("context",), ()),
}
OF_EVERY_STRATEGY = ("expert_parallel_size", "timeout_seconds")


def check_arguments(cfg: DictConfig) -> None:
    """Refuses an option whose class, none of ours, does not take its keys; before any rank is started.

    Args:
        cfg: The root config, which `trust.check_targets` has passed.

    Raises:
        ConfigError: naming the class and the keys.
    """
    for group, part in trust.GROUPS.items():
        node = cfg.get(group)
        target = node.get("_target_") if isinstance(node, DictConfig) else None
        if target is None or target in part.ours or group == "measure":
            continue
        positional, named = _GIVEN.get(group, ((), ()))
        leave = OF_EVERY_STRATEGY if group == "strategy" else ()
        keys = [str(name) for name in node if name not in (*_OF_HYDRA, *leave)]
        given = [*node.get("_args_", []), *positional]
        called = trust.find(f"{group}._target_", target, cfg)
        if not node.get("_partial_"):
            _check_taken(group, called, given, dict.fromkeys([*keys, *named]), keys)


def construct(group: str, node: DictConfig, cfg: DictConfig, *, partial: bool = False, **kwargs: Any) -> Any:
    """Calls what an option names with the option's keys; plain containers, no OmegaConf objects in them.

    In place of `hydra.utils.instantiate`, which evaluates `${...}` a second time and so would change a user's text.

    Args:
        node: The option, with its `_target_`.
        cfg: The root config.
        partial: Returns a function that makes the object.
        kwargs: Arguments beside or instead of the option's keys.

    Raises:
        ConfigError: the group may not build what the option names, see `trust.check_targets`; or what it names does
            not take the option's keys or values.
    """
    trust.check_part(group, node, cfg)
    plain: Any = OmegaConf.to_container(node, resolve=True)
    make = _bound(group, plain, cfg, kwargs)
    return make if partial or plain.get("_partial_") else make()


def _bound(key: str, plain: dict[str, Any], cfg: DictConfig, kwargs: dict[str, Any]) -> Callable[..., Any]:
    called = trust.find(f"{key}._target_", plain["_target_"], cfg)
    own = {name: value for name, value in plain.items() if name not in (*_OF_HYDRA, *kwargs)}
    positional = plain.get("_args_", [])
    if plain.get("_recursive_", True):
        own, positional = _built(key, own, cfg), _built(f"{key}._args_", positional, cfg)
    return functools.partial(_call, key, called, list(own), *positional, **own, **kwargs)


def _call(key: str, called: Any, keys: Sequence[str], /, *positional: Any, **named: Any) -> Any:
    _check_taken(key, called, positional, named, keys)
    try:
        return called(*positional, **named)
    except ConfigError:
        raise
    except Exception as error:
        if called.__module__.partition(".")[0] == "sidestream":
            raise
        name, why = _name(called), " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            key,
            name,
            f"cannot be built with {_listed(keys)}: {why}",
            expected="values that it takes",
            fix="run with debug=true to see where it failed",
        ) from error


def _check_taken(
    key: str, called: Any, positional: Sequence[Any], named: dict[str, Any], keys: Sequence[str]
) -> None:
    """Refuses arguments that a class does not take, before it is called."""
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(*positional, **named)
    except TypeError as error:
        takes = list(signature.parameters.values())[len(positional) :]
        names = [p.name for p in takes if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        group = key.partition(".")[0]
        raise ConfigError(
            key,
            _name(called),
            f"cannot be built with {_listed(keys)}: {error}",
            expected=f"the keys that it takes: {', '.join(names) or 'none'}",
            # A class that is typed over a shipped option has that option's keys, and they cannot be removed.
            fix=f"run with -cd <folder> {group}=<name>, where <folder>/{group}/<name>.yaml has its _target_ and keys",
        ) from error


def _name(called: Any) -> str:
    return f"{called.__module__}.{called.__qualname__}"


def _listed(keys: Sequence[str]) -> str:
    return f"the keys {', '.join(keys)}" if keys else "no keys"


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
