"""How a key of the config is declared: its meaning, its limits, its choices. Values live in conf/.

Each key of a schema says in one line what it means, with its unit. docs/configuration.md is made of these lines, and
`python train.py --help` of the lines of the groups.
"""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


def key(
    meaning: str,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
    length: int | None = None,
    auto: bool = False,
    real: bool = False,
    default: Any = MISSING,
) -> Any:
    """A key whose value comes from YAML, with the limits that `keys.check_keys` enforces.

    Limits of a list are those of its items, and `length` how many there are. Without `high` a number still has
    one: `keys.LARGEST_INTEGER`, `keys.LARGEST_NUMBER`. `auto` allows `auto` beside an integer, or with `real`
    beside any number. `default` is for a key that YAML files may leave out.
    """
    limits = {"low": low, "above": above, "high": high, "below": below, "length": length}
    said = {"meaning": meaning, **limits, "auto": auto, "real": real}
    if default is list:
        return field(default_factory=list, metadata=said)
    return field(default=default, metadata=said)


def one_of(choices: tuple[object, ...], meaning: str) -> Any:
    """A key that takes one of a few values."""
    return field(default=MISSING, metadata={"meaning": meaning, "choices": choices})


def part(meaning: str, schema: type | None = None, *, note: str = "", default: Any = MISSING) -> Any:
    """A group of keys.

    Args:
        meaning: One line for the help page, without a full stop.
        schema: Dataclass of its keys; None where users may write options of their own, which have no schema here.
        note: What docs/configuration.md says below the options.
        default: Without a schema, for a group that a config may leave out.
    """
    said = {"meaning": meaning, "note": note, "group": True}
    if schema is not None:
        return field(default_factory=schema, metadata=said)
    return field(default=default, metadata=said)


@dataclass
class Component:
    """An option that is a class: `_target_` names it, the other keys are its arguments."""

    _target_: str = MISSING


__all__ = ["Component", "key", "one_of", "part"]
