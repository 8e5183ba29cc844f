"""What a config takes from the environment stays a name in whatever is written or sent: `${oc.env:TOKEN}`.

The process that starts the ranks evaluates the config once. What depends on a variable is stored under the variable's
name, or as it was typed, and its value reaches the ranks through their environment alone; files are never evaluated.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.resolvers import oc

from sidestream.config.resume_contract import OWN_KEYS, RULES

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
Withheld = list[tuple[list[str | int], str, Any]]
_FAILED = object()


def find(cfg: DictConfig, plain: dict[str, Any]) -> Withheld:
    """Finds what depends on variables of the environment: the config is evaluated again, with names for their values.

    What cannot be evaluated so, or becomes something else than a name, counts as theirs too. Numbers stay where they
    are settings of the run: its result says them, and eval.py builds the model from them.

    Args:
        cfg: Composed, with its interpolations.
        plain: The same, evaluated.
    """
    raw = OmegaConf.to_container(cfg, resolve=False)
    if "oc.env" not in json.dumps(raw, default=str):
        return []
    asked: set[str] = set()
    with _names_for_values(asked):
        untyped = OmegaConf.create(raw)  # a name is no number, which a typed key would refuse

        def search(value: Any, path: list[str | int]) -> Iterator[tuple[list[str | int], str, Any]]:
            asked.clear()
            named = _read(untyped, path)
            alike: Any = None
            if isinstance(value, dict) and isinstance(named, DictConfig) and named.keys() == value.keys():
                alike = value.keys()
            elif isinstance(value, list) and isinstance(named, ListConfig) and len(named) == len(value):
                alike = range(len(value))
            if alike is not None:
                for part in alike:
                    yield from search(value[part], [*path, part])
            elif asked and value is not None and not (_is_setting(path, value) or _same(named, value)):
                yield path, _text(named, raw, path), value

        return list(search(plain, []))


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
def _names_for_values(asked: set[str]) -> Iterator[None]:
    """Variables are names meanwhile; `asked` gets those that somebody reads."""

    def name_of(key: str, *default: Any) -> Any:
        if key in HARMLESS or key not in os.environ:
            return oc.env(key, *default)
        asked.add(key)
        return f"{_BEGIN}{key}{_END}"

    OmegaConf.register_new_resolver("oc.env", name_of, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def _is_setting(path: list[str | int], value: Any) -> bool:
    """Whether this is a number of the run, or of a part that it builds."""
    key = ".".join(part for part in path if isinstance(part, str))
    return isinstance(value, int | float) and (key in RULES or path[0] in OWN_KEYS)


def _same(named: Any, value: Any) -> bool:
    return not isinstance(named, DictConfig | ListConfig) and bool(named == value)


def _read(node: Any, path: list[str | int]) -> Any:
    """The value at a path; `_FAILED` where it cannot be evaluated with names for values."""
    try:
        for part in path:
            node = node[part]
    except Exception:  # a resolver of anybody's may say anything of a name
        return _FAILED
    return node


def _text(named: Any, raw: Any, path: list[str | int]) -> str:
    """What stands for a value: its text with names in it, or what was typed."""
    if isinstance(named, str) and _BEGIN in named:
        return named.replace(_BEGIN, "${oc.env:").replace(_END, "}")
    for part in path:
        raw = raw if isinstance(raw, str) else raw[part]  # what lies deeper is what a resolver returned
    return str(raw)


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
