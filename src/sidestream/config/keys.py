"""Checks of single keys: unknown, renamed, missing or out of range. Cross checks are in compatibility.py."""

from dataclasses import Field
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from sidestream.config.errors import ConfigError
from sidestream.config.hints import RENAMED, unknown_key
from sidestream.config.meant import (
    LARGEST_INTEGER,
    LARGEST_NUMBER,
    OPEN,
    advice,
    default_of,
    default_option,
    in_range,
    meant,
)
from sidestream.config.schema import SCHEMAS, Root

# Other keys have their limits from these, and would refuse the lowest that these can be.
_NOT_ALONE = (
    "data.global_batch_size",
    "model.hidden_size",
    "model.num_experts",
    "model.num_heads",
    "model.num_layers",
    "model.vocab_size",
)


def takes_a_list(key: str) -> bool:
    """Whether a key has a list as its value in some shipped option."""
    group, _, name = key.rpartition(".")
    schemas: list[Any] = [*SCHEMAS.get(group, {}).values()] if group else [Root]
    kinds = [
        schema.__dataclass_fields__[name].type for schema in schemas if name in schema.__dataclass_fields__
    ]
    return any("list" in str(kind) for kind in kinds)


def check_keys(cfg: DictConfig) -> None:
    """Refuses unknown and missing keys and values out of range, wherever a schema says what is right.

    Hydra itself refuses `model.bogus=1` but takes `+model.bogus=1`, also under a schema.

    Raises:
        ConfigError: for the first such key.
    """
    _walk(cfg, "")


def _walk(node: DictConfig, prefix: str) -> None:
    schema = OmegaConf.get_type(node)
    fields: dict[str, Field] = getattr(schema, "__dataclass_fields__", {})
    for name in map(str, node):
        key = f"{prefix}{name}"
        if OmegaConf.is_missing(node, name):
            fix = f"{key}={default_option(key) or OPEN}"
            raise ConfigError(key, "???", "has no value", expected="a value", fix=fix)
        value = node[name]
        # Old spellings are also refused in a user's own option, where any key is allowed.
        # A part with a schema of its own is from the file of the script that was started.
        typed = isinstance(value, DictConfig) and hasattr(OmegaConf.get_type(value), "__dataclass_fields__")
        if (fields and name not in fields and not typed) or key in RENAMED:
            typed_value = OmegaConf.to_object(value) if OmegaConf.is_config(value) else value
            raise unknown_key(key, typed_value, [str(other) for other in node if other != name])
        if isinstance(value, DictConfig) and not (name in fields and fields[name].metadata.get("auto")):
            _walk(value, f"{key}.")
        elif name in fields:
            _check_value(key, value, fields[name].metadata)


def _check_value(key: str, value: Any, limits: Any) -> None:
    choices = limits.get("choices")
    if choices and not any(value == choice and type(value) is type(choice) for choice in choices):
        shown = [str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in choices]
        raise ConfigError(
            key, value, "not a choice", expected=f"one of {', '.join(shown)}", fix=advice(key, value)
        )
    if isinstance(value, ListConfig) and any(isinstance(item, ListConfig | DictConfig) for item in value):
        raise ConfigError(key, value, "not a flat list", expected="plain values", fix=f"{key}=[<value>,...]")
    if limits.get("auto"):
        if value is None or value == "auto":  # null where it is not allowed is refused by OmegaConf
            return
        kinds, kind = (int | float, "a number") if limits.get("real") else (int, "an integer")
        if not isinstance(value, kinds) or isinstance(value, bool):
            fix = f"{key}={meant(key, value) or 'auto'}"
            raise ConfigError(key, value, f"not {kind}", expected=f"auto or {kind}", fix=fix)
    values = value if isinstance(value, ListConfig) else [value]
    length = limits.get("length")
    if length is not None and len(values) != length:
        raise ConfigError(
            key, list(values), f"{len(values)} values", expected=f"{length}", fix=f"{key}={default_of(key)}"
        )
    for one in values:
        if isinstance(one, int | float) and not isinstance(one, bool):
            _check_range(key, one, limits, shown=list(values) if length is not None else one)


def _check_range(key: str, value: float, limits: Any, *, shown: object) -> None:
    if in_range(value, limits, whole=isinstance(value, int)):
        return
    low, above, high, below = (limits.get(name) for name in ("low", "above", "high", "below"))
    most = high if high is not None else LARGEST_INTEGER if isinstance(value, int) else LARGEST_NUMBER
    too_low = (low is not None and value < low) or (above is not None and value <= above)
    too_high = value > most or (below is not None and value >= below)
    bounds = [f">= {low}"] if low is not None else []
    bounds += [f"> {above}"] if above is not None else []
    bounds += [f"< {below}"] if below is not None else []
    bounds += (
        [f"<= {most:g}" if isinstance(most, float) else f"<= {most}"] if high is not None or too_high else []
    )
    if limits.get("auto"):
        fix = f"{key}=auto"
    elif too_low and isinstance(low, int) and key not in _NOT_ALONE:
        fix = f"{key}={low}"
    else:
        fix = f"{key}={default_of(key)}"
        if too_low and fix.endswith("=null") and key not in _NOT_ALONE:  # somebody wants it, and not null
            fix = f"{key}=1"
    raise ConfigError(key, shown, "out of range", expected=f"a value {' and '.join(bounds)}", fix=fix)
