"""The value that somebody meant: `1e3` for a whole number, `none` for null, `yep` for true; else the default."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import Field, is_dataclass
from typing import Any, cast

from omegaconf import OmegaConf

from sidestream.config.errors import as_typed
from sidestream.config.place import CONF
from sidestream.config.schema import SCHEMAS, Root

# Where a schema says nothing else. Beyond these something overflows: a C integer, a time, a float's range.
LARGEST_INTEGER, LARGEST_NUMBER = 2**31 - 1, 1e12
OPEN = "<value>"  # in an advice: nobody can know it
# Choice -> other spellings of it, whatever the key.
_CHOICES = {
    "bf16-mixed": ("bf16", "bfloat16", "16", "fp16", "float16", "16-mixed", "mixed"),
    "32-true": ("fp32", "float32", "32", "full"),
    "gpu": ("cuda", "nvidia"),
    "cpu": ("mps", "tpu", "none"),
    "error": ("raise", "fail", "abort"),
    "replay": ("retry", "repeat", "rerun"),
    "bytes": ("byte", "char", "chars", "utf-8", "none", "null"),
    "documents": ("docs", "document", "padded", "packed", "true"),
    "concat": ("stream", "none", "off", "false"),
    "micro_batch": ("batch", "local"),
    "sequence": ("seq",),
    "library": ("native", "nccl"),
    "torch": ("gloo", "pytorch"),
}
_WORDS = {
    "true": ("true", "yes", "yep", "y", "on", "1", "1.0", "enabled"),
    "false": ("false", "no", "nope", "n", "off", "0", "0.0", "disabled", "none", "null"),
}
_NOTHING = ("none", "null", "nil", "off", "no", "false", "disabled", "unset", "unlimited", "")
_NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)([kmb]?)", re.IGNORECASE)
_TIMES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}


def field_of(key: str) -> Field | None:
    """The field of the first schema that has a key; None: none has it."""
    group, _, rest = key.partition(".")
    schemas: list[Any] = [*SCHEMAS.get(group, {}).values()] if rest else [Root]
    for schema in schemas:
        *parts, last = (rest or group).split(".")
        for part in parts:
            found = getattr(schema, "__dataclass_fields__", {}).get(part)
            kinds = [] if found is None else [found.type, *getattr(found.type, "__args__", ())]
            schema = next(filter(is_dataclass, kinds), None)
        field = getattr(schema, "__dataclass_fields__", {}).get(last)
        if field is not None:
            return field
    return None


def advice(key: str, value: object, chosen: Mapping[str, str] | None = None) -> str:
    """`key=` with what was meant, or with the shipped default, or with `<value>`.

    Args:
        chosen: Group -> option on the command line, whose own default is taken.
    """
    return f"{key}={meant(key, value) or default_of(key, chosen)}"


def meant(key: str, value: object) -> str | None:
    """The value that a key takes and that a wrong one stands for, as it is typed; None where that is a guess.

    A value that the key takes is meant as it is.
    """
    field = field_of(key)
    text = str(as_typed(value)).strip().strip("'\"") if not isinstance(value, dict) else "{}"
    if field is None:
        return text or None
    limits, kind = cast(Any, field.metadata), str(field.type)
    plain = text.lower()
    if choices := limits.get("choices"):
        return choice_of(plain, [as_typed(choice) for choice in choices])
    if "list" in kind:
        return _list(text, limits, numbers="float" in kind)
    if plain in _NOTHING and "None" in kind:
        return "null"
    if limits.get("auto") and plain == "auto":
        return plain
    if "bool" in kind:
        return next((word for word, spellings in _WORDS.items() if plain in spellings), None)
    if "int" in kind or "float" in kind or limits.get("auto"):
        return _number(plain, limits, whole="float" not in kind and not limits.get("real"))
    plain_text = re.fullmatch(r"[\w./:@~-][\w./:@~ -]*", text) is not None
    return text if plain_text and "Any" not in kind and not any(map(is_dataclass, _args(field))) else None


def _args(field: Field) -> Sequence[Any]:
    return getattr(field.type, "__args__", ())


def _number(text: str, limits: Any, *, whole: bool) -> str | None:
    found = _NUMBER.fullmatch(text.replace("_", ""))
    if found is None:
        return None
    number = float(found.group(1)) * _TIMES[found.group(2).lower()]
    if not in_range(number, limits, whole=whole) or (whole and number != int(number)):
        return None
    if whole:
        return str(int(number))
    return found.group(1) if not found.group(2) else repr(number)


def in_range(value: float, limits: Any, *, whole: bool) -> bool:
    """Whether a number is within the limits of a schema's field."""
    low, above, high, below = (limits.get(name) for name in ("low", "above", "high", "below"))
    most = high if high is not None else LARGEST_INTEGER if whole else LARGEST_NUMBER
    return (
        value == value
        and value <= most
        and abs(value) <= max(most, LARGEST_NUMBER)
        and (low is None or value >= low)
        and (above is None or value > above)
        and (below is None or value < below)
    )


def _list(text: str, limits: Any, *, numbers: bool) -> str | None:
    items = [item.strip() for item in text.strip("[]").split(",") if item.strip()]
    if limits.get("length") not in (None, len(items)) or not items:
        return None
    if numbers:
        found = [_number(item, limits, whole=False) for item in items]
        return f"[{','.join(map(str, found))}]" if all(found) else None
    return f"[{','.join(items)}]" if all(re.fullmatch(r"[\w./~*-]+", item) for item in items) else None


def choice_of(value: object, choices: Sequence[str]) -> str | None:
    """The choice that a wrong value stands for; None: none looks like it."""
    typed = str(as_typed(value)).lower()
    for choice in choices:
        if typed == choice or typed in _CHOICES.get(choice, ()) or typed in _WORDS.get(choice, ()):
            return choice
    close = difflib.get_close_matches(typed, choices, n=1, cutoff=0.6)
    begins = [choice for choice in choices if typed and choice.startswith(typed)]
    return next(iter(begins or close), None)


def default_of(key: str, chosen: Mapping[str, str] | None = None) -> str:
    """The value that a key has in the option that was chosen, or in the one that is shipped as the first."""
    group, _, inner = key.partition(".")
    first = [(chosen or {}).get(group), default_option(group)]
    files = sorted((CONF / group).glob("*.yaml"), key=lambda path: (path.stem not in first, path.stem))
    files.sort(key=lambda path: first.index(path.stem) if path.stem in first else len(first))
    for path in files if inner else [CONF / "train.yaml"]:
        value: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        for name in (inner or key).split("."):
            value = value.get(name, "???") if isinstance(value, dict) else "???"
        if value != "???" and not isinstance(value, dict):
            text = as_typed(value)
            return text if text and re.search(r"[${}\s'\"]", text) is None else OPEN
    return OPEN


def default_option(group: str) -> str | None:
    """The option of a group that train.py takes where nothing is said; None of what is no group."""
    for entry in OmegaConf.load(CONF / "train.yaml").defaults:
        if OmegaConf.is_dict(entry) and group in entry:
            return entry[group]
    return None


def options_of(group: str) -> list[str]:
    """The shipped options of a group, the default first."""
    first = default_option(group)
    return sorted(
        (path.stem for path in (CONF / group).glob("*.yaml")), key=lambda name: (name != first, name)
    )
