"""What a config takes from the environment stays a name in whatever is written or sent: `${oc.env:TOKEN}`.

The process that starts the ranks evaluates the config once. Text that depends on a variable is stored under the
variable's name, and its value reaches the ranks through their environment alone; files are never evaluated.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

VARIABLE = "SIDESTREAM_WITHHELD"  # of a rank: where the values belong, as JSON
# Places and names that a config may hold as text. Any other variable may be a secret.
HARMLESS = (
    "SIDESTREAM_CACHE",
    "XDG_CACHE_HOME",
    "HOME",
    "PWD",
    "TMPDIR",
    "SCRATCH",
    "SLURM_JOB_ID",
    "SLURM_TMPDIR",
    "WANDB_PROJECT",
    "WANDB_ENTITY",
)
_BEGIN, _END = "\ue0f0", "\ue0f1"  # private characters around a name while the config is evaluated

# Path of a key, the text that stands for the value, the value.
Withheld = list[tuple[list[str | int], str, str]]


def find(cfg: DictConfig, plain: dict[str, Any]) -> Withheld:
    """Finds the texts of a config that depend on variables of the environment.

    Args:
        cfg: Composed, with its interpolations.
        plain: The same, evaluated.
    """
    raw = OmegaConf.to_container(cfg, resolve=False)
    if "oc.env" not in json.dumps(raw, default=str):
        return []
    found: Withheld = []
    with _names_for_values():
        untyped = OmegaConf.create(raw)  # a name is no number, which a typed key would refuse
        for path, value in _texts(plain, []):
            named = _read(untyped, path)
            if isinstance(named, str) and _BEGIN in named:
                text = named.replace(_BEGIN, "${oc.env:").replace(_END, "}")
                found.append((path, text, value))
    return found


def names(plain: dict[str, Any], withheld: Withheld) -> dict[str, Any]:
    """Returns the config as it is stored and sent."""
    return _with(plain, [(path, text) for path, text, _ in withheld])


def values(plain: dict[str, Any], withheld: Withheld) -> dict[str, Any]:
    """Returns the config as it is used."""
    return _with(plain, [(path, value) for path, text, value in withheld if _at(plain, path) == text])


def publish(withheld: Withheld) -> None:
    """Hands the values to processes that are started from now on."""
    os.environ[VARIABLE] = json.dumps(withheld)


def published() -> Withheld:
    """Returns what the process that started this one handed over."""
    return [(path, text, value) for path, text, value in json.loads(os.environ.get(VARIABLE, "[]"))]


@contextmanager
def _names_for_values() -> Iterator[None]:
    def name_of(key: str, *default: Any) -> Any:
        if key in HARMLESS or key not in os.environ:
            return oc.env(key, *default)
        return f"{_BEGIN}{key}{_END}"

    OmegaConf.register_new_resolver("oc.env", name_of, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def _texts(value: Any, path: list[str | int]) -> Iterator[tuple[list[str | int], str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(item, [*path, key])
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from _texts(item, [*path, place])


def _read(node: Any, path: list[str | int]) -> Any:
    """The value at a path; None where it cannot be evaluated with names for values."""
    try:
        for part in path:
            node = node[part]
    except (OmegaConfBaseException, LookupError, TypeError, ValueError):
        return None
    return node


def _at(plain: Any, path: list[str | int]) -> Any:
    try:
        for part in path:
            plain = plain[part]
    except (LookupError, TypeError):
        return None
    return plain


def _with(plain: dict[str, Any], changes: list[tuple[list[str | int], str]]) -> dict[str, Any]:
    changed = copy.deepcopy(plain) if changes else plain
    for (*above, last), text in changes:
        if _at(changed, [*above, last]) is not None:
            _at(changed, above)[last] = text
    return changed
