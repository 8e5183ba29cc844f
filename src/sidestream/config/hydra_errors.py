"""Turns what Hydra and OmegaConf raise into one line in the form of `ConfigError`."""

import re
import traceback
from typing import Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException, SearchPathException
from omegaconf import DictConfig
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationKeyError,
    OmegaConfBaseException,
    UnsupportedInterpolationType,
    ValidationError,
)

from sidestream import cli
from sidestream.config.errors import ConfigError
from sidestream.config.hints import nearest_option, unknown_key
from sidestream.config.meant import advice, default_of, options_of
from sidestream.config.schema import SCHEMAS, optional_parts

# ValueError: Hydra's own for a wrong mix of flags or a misused group override.
USER_ERRORS = (HydraException, OmegaConfBaseException, ValueError)

_UNKNOWN = re.compile(r"Could not (?:override|delete|append).*?'[+~]*([\w./@-]+?)(?:=.*)?'", re.DOTALL)
_ADDED = re.compile(r"An item is already at '([\w.]+)'")
_REMOVED = re.compile(r"Error merging override ~([\w.]+)")
_NO_NAME = re.compile(r"Config group override must be a string or a list. Got (\w+)")
_MERGED = re.compile(r"Error merging override '?[+~]*([\w.-]+)=")
_SEE = "run `python train.py --cfg job` to see all keys"
_MIXED = re.compile(r"Merge error: (\w+) is not a subclass of \w+")
_WRONG_TYPE = re.compile(r"full_key: ([\w.\[\]-]+)")


def is_of_user(error: Exception) -> bool:
    """Whether an exception of composing a config is about what the user typed, and not a mistake of ours."""
    return isinstance(error, USER_ERRORS) or _is_of_omegaconf(error)


def _is_of_omegaconf(error: BaseException) -> bool:
    """OmegaConf fails on an assert, or on an attribute of None, where a group of keys is null in the YAML."""
    if not isinstance(error, AssertionError | AttributeError):
        return False
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and str(frames[-1][0].f_globals.get("__name__")).startswith("omegaconf.")


def explain(error: Exception, overrides: list[str]) -> str:
    """Returns one line for an exception raised while composing a config.

    Args:
        overrides: what the user typed, to name the value of a wrong key.
    """
    if isinstance(error, ConfigError):
        return str(error)
    typed = dict(part.lstrip("+~").partition("=")[::2] for part in overrides)
    causes = _chain(error)
    # Innermost first where the keys beside an unknown one are known there.
    causes.sort(key=lambda cause: not isinstance(getattr(cause, "parent_node", None), DictConfig))
    for cause in causes:
        explained = _explain_one(cause, typed)
        if explained:
            return str(explained)
    merged = _MERGED.match(str(error))
    if merged and any("with ListConfig" in str(cause) for cause in causes):
        key = merged.group(1)
        return str(_wrong_type(key, typed, "ListConfig"))
    messages = dict.fromkeys(str(cause).partition("\n")[0] for cause in causes)
    return ": ".join(message for message in messages if message)


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    return chain


def _explain_one(error: BaseException, typed: dict[str, str]) -> ConfigError | None:
    message = str(error)
    # Another key's mistake is an error of another class: OmegaConf has no words for a key below null.
    if type(error) in (AssertionError, AttributeError) and _is_of_omegaconf(error):
        return _part_of_null(typed)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _missing_option(error, typed)
    if isinstance(error, OverrideParseException):
        key, _, value = error.override.partition("=")
        why = message.splitlines()[0]
        expected = "key=value, with quotes around spaces and special characters"
        return ConfigError(key, value, why, expected=expected, fix=f"{key}='<value>'")
    if isinstance(error, SearchPathException):
        folder = message.partition("'")[2].partition("'")[0]
        why = "there is no such folder"
        return ConfigError("-cd", folder, why, expected="an existing folder", fix="run with -cd <folder>")
    if isinstance(error, ConfigKeyError | ConfigAttributeError) and error.full_key:
        # `modle.num_layers=3` is refused at `modle`.
        key = next((key for key in typed if f"{key}.".startswith(f"{error.full_key}.")), error.full_key)
        beside = error.parent_node if key == error.full_key else None
        return unknown_key(key, typed.get(key, "..."), map(str, beside or ()), typed)
    if isinstance(error, ValidationError) and (group := _MIXED.search(message)):
        return _two_options(typed, group.group(1))
    if isinstance(error, ValidationError) and (found := _WRONG_TYPE.search(message)):
        return _wrong_type(found.group(1), typed, message.splitlines()[0])
    if isinstance(error, InterpolationKeyError | UnsupportedInterpolationType) and error.full_key:
        key, why = error.full_key, message.partition("\n")[0]
        expected, value = "an existing key inside ${...}", typed.get(key, "...")
        if "${" not in value:
            return ConfigError(key, value, why, expected=expected, fix=cli.spelled(_SEE))
        text = value.strip("'\"").replace("\\${", "${").replace("${", "\\${")
        expected = f"{expected}, or \\${{...}} for the text itself"
        return ConfigError(key, value, why, expected=expected, fix=f"set '{key}=\"{text}\"'")
    if found := _ADDED.search(message):
        key = found.group(1)
        why, expected = "there already, and + adds a key", "the key without +"
        return ConfigError(
            key, typed.get(key, "..."), why, expected=expected, fix=advice(key, typed.get(key), typed)
        )
    if found := _REMOVED.search(message):
        key = found.group(1)
        why, expected = "a key of the schema is set, not removed", "a value"
        return ConfigError(
            f"~{key}", typed.get(key, ""), why, expected=expected, fix=f"{key}={default_of(key, typed)}"
        )
    if found := _UNKNOWN.search(message):
        return unknown_key(found.group(1), typed.get(found.group(1), "..."), chosen=typed)
    if found := _NO_NAME.search(message):
        return _no_text(typed, found.group(1))
    return None


def _part_of_null(typed: dict[str, str]) -> ConfigError | None:
    for key, value in typed.items():
        if value != "null" and any(f"{key}.".startswith(f"{part}.") for part in optional_parts()):
            why = "null in this option, and the command line cannot make a group of keys of it"
            expected = "an option whose YAML states it, as that of model=deepseek_v3"
            return ConfigError(key, value, why, expected=expected, fix="model=deepseek_v3")
    return None


def _two_options(typed: dict[str, str], schema: str) -> ConfigError | None:
    """Several options of a group that takes one: `logger=[csv,wandb]`."""
    for group, value in typed.items():
        if group in SCHEMAS and value.startswith("["):
            first = value.strip("[]").split(",")
            meant = next((o for o in first if SCHEMAS[group].get(o, Any).__name__ == schema), first[0])
            fix = f"set {group}={meant}, or run with -m {group}={','.join(first)} for one run with each"
            return ConfigError(group, value, "takes one option", expected="one name", fix=fix)
    return None


def _missing_option(error: MissingConfigException, typed: dict[str, str]) -> ConfigError:
    missing = str(error.missing_cfg_file)
    group, _, option = missing.rpartition("/")
    if not group:
        return ConfigError("--config-name", option, "no such config", expected="train", fix="run without -cn")
    first, _, rest = missing.partition("/")
    if first in SCHEMAS and rest == typed.get(first):  # an option is no path, a file may be meant
        group, option = first, rest
    options = options_of(group) if group in SCHEMAS else sorted(error.options or [])
    options += [name for name in error.options or [] if name not in options]  # a user's own
    best = f"{group}={nearest_option(group, option, options)}"
    if group == "data" and "/" in option:
        best = f"data=text data.files=[{option}]"
    shown = ", ".join(sorted(options))
    return ConfigError(group, option, "no such option", expected=f"one of {shown}", fix=best)


def _no_text(typed: dict[str, str], kind: str) -> ConfigError | None:
    """A group that is set to what is no name: `logger=false`, `trainer=2`."""
    for group, value in typed.items():
        is_name = (
            value.lower() not in ("true", "false") and re.fullmatch(r"[-+.\d]+(e[-+]?\d+)?", value) is None
        )
        if group in SCHEMAS and not is_name:
            options = options_of(group)
            fix = f"{group}={nearest_option(group, value, options)}"
            why = f"a {'truth value' if kind == 'bool' else 'number'}, not the name of an option"
            return ConfigError(group, value, why, expected=f"one of {', '.join(sorted(options))}", fix=fix)
    return None


def _wrong_type(key: str, typed: dict[str, str], why: str) -> ConfigError:
    key = key.partition("[")[0]  # an item is typed with its list
    value = typed.get(key, "...")
    wanted = re.search(r"could not be converted to (\w+)", why)
    kinds = {"Integer": "an integer", "Float": "a number"}
    expected = kinds.get(wanted.group(1) if wanted else "", "another type of value")
    if wanted:
        why = f"not {expected}"
    elif "not Optional" in why:
        why, expected = "may not be null", "a value"
    elif "ListConfig" in why:
        why, expected = "not a list", "a list"
    elif "valid bool" in why:
        why, expected = "neither true nor false", "true or false"
    return ConfigError(key, value, why, expected=expected, fix=advice(key, value, typed))
