"""Checks of single keys: unknown, renamed, missing or out of range. Cross checks are in compatibility.py."""

from dataclasses import Field
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from sidestream.config.errors import ConfigError, as_typed
from sidestream.config.hints import RENAMED, nearest_value, unknown_key
from sidestream.config.place import CONF
from sidestream.config.schema import SCHEMAS, Root

# Where a schema says nothing else. Beyond these something overflows: a C integer, a time, a float's range.
LARGEST_INTEGER, LARGEST_NUMBER = 2**31 - 1, 1e12
_FIRST = [
    "tiny",
    "softmax",
    "aux_loss",
    "alltoall",
    "adamw",
    "wsd",
    "default",
    "replicate",
]  # options to quote


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
            raise ConfigError(key, "???", "has no value", expected="a value", fix=f"{key}=<value>")
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
            key,
            value,
            "not a choice",
            expected=f"one of {', '.join(shown)}",
            fix=f"{key}={nearest_value(value, shown)}",
        )
    if isinstance(value, ListConfig) and any(isinstance(item, ListConfig | DictConfig) for item in value):
        raise ConfigError(key, value, "not a flat list", expected="plain values", fix=f"{key}=[<value>,...]")
    if limits.get("auto"):
        if value is None or value == "auto":  # null where it is not allowed is refused by OmegaConf
            return
        kinds, kind = (int | float, "a number") if limits.get("real") else (int, "an integer")
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise ConfigError(key, value, f"not {kind}", expected=f"auto or {kind}", fix=f"{key}=auto")
    values = value if isinstance(value, ListConfig) else [value]
    length = limits.get("length")
    if length is not None and len(values) != length:
        raise ConfigError(
            key, list(values), f"{len(values)} values", expected=f"{length}", fix=_set_default(key)
        )
    for one in values:
        if isinstance(one, int | float) and not isinstance(one, bool):
            _check_range(key, one, limits, shown=list(values) if length is not None else one)


def _check_range(key: str, value: float, limits: Any, *, shown: object) -> None:
    low, above, high, below = (limits.get(name) for name in ("low", "above", "high", "below"))
    most = high if high is not None else LARGEST_INTEGER if isinstance(value, int) else LARGEST_NUMBER
    too_low = (low is not None and value < low) or (above is not None and value <= above)
    too_high = value > most or (below is not None and value >= below)
    if value == value and abs(value) <= max(most, LARGEST_NUMBER) and not too_low and not too_high:
        return
    bounds = [f">= {low}"] if low is not None else []
    bounds += [f"> {above}"] if above is not None else []
    bounds += [f"< {below}"] if below is not None else []
    bounds += (
        [f"<= {most:g}" if isinstance(most, float) else f"<= {most}"] if high is not None or too_high else []
    )
    if limits.get("auto"):
        fix = f"{key}=auto"
    elif too_low and isinstance(low, int):
        fix = f"{key}={low}"
    else:
        fix = _set_default(key)
        if too_low and fix.endswith("=null"):  # somebody wants it, and not null
            fix = f"{key}=1"
    raise ConfigError(key, shown, "out of range", expected=f"a value {' and '.join(bounds)}", fix=fix)


def _set_default(key: str) -> str:
    """An override to the value that the first of the shipped options with this key has."""
    group, _, inner = key.partition(".")
    files = sorted((CONF / group).glob("*.yaml"), key=lambda path: path.stem not in _FIRST)
    for path in files if inner else [CONF / "train.yaml"]:
        value = OmegaConf.select(OmegaConf.load(path), inner or key, default="???", throw_on_missing=False)
        if value != "???":
            plain = list(value) if isinstance(value, ListConfig) else value
            return f"{key}={as_typed(plain)}"
    return f"{key}=<value>"
